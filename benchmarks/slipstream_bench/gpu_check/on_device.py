"""Settings for the benchmarks' stacks on the real device, in place of the simulated one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slipstream_bench.gpu_check.gpu_stack import GRAPH_SIZES, core_config
from slipstream_bench.gpu_check.models import model_of, stand_in_tokenizer
from slipstream_bench.gpu_check.setting import GpuSetting
from slipstream_core.runner.model.random_weights import random_config


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Implements `slipstream_bench.common.simulated_stack.Device`."""

    setting: GpuSetting
    shape: str
    batch: int
    max_model_len: int
    num_tokens: int  # capacity of the cache
    stream_interval: int | Literal["auto"] = "auto"

    def settings(self) -> dict[str, Any]:
        """A stack's settings."""
        model = model_of(self.shape, is_quick=self.setting.is_quick)
        config = core_config(
            self.setting,
            self.shape,
            num_requests=self.batch,
            max_model_len=self.max_model_len,
            num_tokens=self.num_tokens,
            graph_sizes=(self.batch,),
        )
        names = [
            *("device", "dtype", "threads", "num_blocks", "max_num_seqs", "max_num_batched_tokens"),
            *(name for name in GRAPH_SIZES if name in config.__struct_fields__),
        ]
        return {
            "model": model,
            "tokenizer": str(
                stand_in_tokenizer(self.setting.folder, random_config(model).vocab_size)
            ),
            "max_model_len": self.max_model_len,
            "stream_interval": self.stream_interval,
            "spare_core": False,
            "spare_worker": False,
            **{name: getattr(config, name) for name in names},
        }
