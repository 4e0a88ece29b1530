"""Worlds and costs for tests of predictions."""

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.plan.costs import UnitCosts
from dlrm_hybrid.plan.simulation.machine import MessageCosts

UNITS = UnitCosts(
    multiply=1e-10,
    layer=4e-4,
    interact=1e-6,
    own_lookup=1e-5,
    lookup=2e-5,
    ask=1e-5,
    serve=4e-6,
    encode_gradient=2e-9,
    encode_activation=5e-9,
    decode_activation=5e-9,
    take_version=1e-9,
    loop=3e-4,
    server_decode=1e-9,
    server_apply=1e-9,
    server_encode=1e-9,
    messages=MessageCosts(send=1e-4, send_byte=1e-10, wake=1e-4),
)
SERVED = ("embedding=served", "parallel.table_servers=1")
WORLDS = {
    "sync": (),
    "compressed": ("gradient=dct", "activation=dct", "pull.precision=bfloat16"),
    "bounded": ("sync=bounded", "sync.staleness=2"),
    "two servers": ("parallel.servers=2", "parallel.cuts=[bottom.2]"),
    "served": SERVED,
    "served ahead": (*SERVED, "parallel.table_servers=2", "embedding.staleness=3"),
    "async": ("sync=async", *SERVED),
    "elastic": ("parallel.elastic=true", *SERVED),
    "deft": ("gradient=deft", "parallel.trainers=3"),
    "terngrad": ("gradient=terngrad",),
    "deduplicated": ("embedding.deduplicate=true", "parallel.trainers=3"),
    "gpipe": ("schedule=gpipe", "schedule.microbatches=4"),
    "one_f_one_b": ("schedule=one_f_one_b", "schedule.microbatches=4"),
    "dsp": ("schedule=dsp",),
    "one trainer": ("parallel.trainers=1", "parallel.servers=0"),
}


def values(*overrides: str) -> dict:
    return dict(compose.values_of(["parallel=hybrid", *overrides]))


def config(*overrides: str) -> Config:
    return validate(values(*overrides))
