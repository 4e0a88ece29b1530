"""Scores new rows: of files by the verb `predict`, of a DataFrame by `Predictor`."""

from dlrm_hybrid.predict.predictor import Predictor

__all__ = ["Predictor"]
