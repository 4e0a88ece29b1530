from dlrm_hybrid.model.own import Features as Features
from dlrm_hybrid.model.own import OwnModel as OwnModel
from dlrm_hybrid.model.spec import ModelSpec as ModelSpec
from dlrm_hybrid.predict.predictor import Predictor as Predictor
from dlrm_hybrid.world.world import World as World

__version__: str
