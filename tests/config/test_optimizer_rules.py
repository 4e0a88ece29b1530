"""Which keys of `optimizer` go together, and with what is pushed."""

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.types import ConfigError

HYBRID = "parallel=hybrid"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optimizer.eps=1e-3", "optimizer.eps=1e-3: only applies to optimizer=adagrad or adam"),
        (
            "optimizer.betas=[0.5,0.9]",
            "optimizer.betas=[0.5,0.9]: only applies to optimizer=adam",
        ),
        (
            "optimizer=adam optimizer.betas=null",
            "optimizer.betas = null: must be a list of 2, each",
        ),
        (
            "optimizer=adam optimizer.eps=null",
            "optimizer.eps = null: must be a number at least 1.17549e-38",
        ),
        ("optimizer=adam optimizer.betas=[0.9,1.0]", "optimizer.betas[1] = 1.0: must be a number"),
        ("optimizer=adam optimizer.betas=[0.9]", "optimizer.betas"),
        ("optimizer=adamw", "optimizer=adamw: no such choice; choose from adagrad, adam, momentum"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay = -1"),
        *(
            (f"{more} {key}={value}", f"{key} = {value}: must be a number {wanted}")
            for key, more in (
                ("optimizer.lr", ""),
                ("optimizer.weight_decay", ""),
                ("optimizer.eps", "optimizer=adam"),
                ("embedding.lr", ""),
                ("embedding.eps", ""),
                ("embedding.weight_decay", "embedding.optimizer=adam"),
                ("embedding.row_error", ""),
                ("embedding.gradient_error", ""),
                ("network.patience_seconds", ""),
                ("checkpoint.restart_window_seconds", ""),
            )
            for value, wanted in (("1e+308", "a"), ("1e-320", "at least"))
            if wanted == "a" or key.endswith("eps")
        ),
        *(
            (f"{HYBRID} {more}=1e+308", f"{key} = 1e+308: must be a number above 0 and at most")
            for key, more in (
                ("gradient.magnitude", "gradient=hard gradient.magnitude"),
                ("gradient.clip", "gradient=terngrad gradient.clip"),
            )
        ),
        (
            "optimizer.decoupled_weight_decay=true",
            "optimizer.decoupled_weight_decay=true: only applies to optimizer=adam",
        ),
        (
            f"{HYBRID} gradient=dct optimizer=adam optimizer.decoupled_weight_decay=true",
            "moves every weight in every update, and gradient=dct sends some; needs false",
        ),
        (
            f"{HYBRID} gradient=dgc optimizer=adam",
            "gradient = 'dgc': needs optimizer=sgd, not adam",
        ),
        (
            f"{HYBRID} gradient=dct gradient.residual=update optimizer=adam",
            "gradient.residual = 'update': needs optimizer=sgd; optimizer=adam must see",
        ),
        (
            "embedding.optimizer=momentum",
            "'sgd' or 'adagrad' or 'rowwise_adagrad' or 'adam' or 'rowwise_adam'",
        ),
        (
            "embedding.betas=[0.8,0.9]",
            "embedding.betas = [0.8, 0.9]: only applies to embedding.optimizer=adam or "
            "rowwise_adam, not sgd",
        ),
        ("embedding.weight_decay=-1", "embedding.weight_decay = -1: must be a number at least 0"),
        ("embedding.init=0", "embedding.init = 0: must be 'uniform_rows' or 'uniform_width' or "),
        ("embedding.init=rows", "embedding.init = 'rows': must be 'uniform_rows' or "),
        (
            f"{HYBRID} embedding.sharding=column_wise embedding.optimizer=rowwise_adam",
            "embedding.optimizer=rowwise_adam keeps one accumulator per full row",
        ),
    ],
)
def test_faults_name_their_keys(overrides: str, message: str):
    with pytest.raises(ConfigError) as raised:
        values_of(overrides.split())
    assert message in str(raised.value)
