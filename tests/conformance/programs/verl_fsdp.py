"""verl's own file of options, with the lines of a command, and its ``build_optimizer``."""

from pathlib import Path

from absent import stand_in

stand_in(
    "ray",
    "pyvers",
    "tensordict",
    "orjson",
    "codetiming",
    "hydra",
    "vllm",
    "sglang",
    "cachetools",
    "aiohttp",
    "pydantic",
)

import small  # noqa: E402
import verl  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402  # after the stand-ins
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer  # noqa: E402

lines = [
    "optimizer_impl=everybit_torch",
    "optimizer=AdamW",
    "lr=1e-2",
    "override_optimizer_config.policy=LEAN_BF16",
]
file = Path(verl.__file__).parent / "trainer/config/optim/fsdp.yaml"
given = OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist(lines))
config = omega_conf_to_dataclass(given, FSDPOptimizerConfig)
model = small.model()
optimizer = build_optimizer(model.parameters(), config)
small.require_policy(optimizer)
small.train(model, optimizer)
