"""What a DeepSpeed calls whose source carries patches/deepspeed-0.19.patch.

Its `initialize` makes an `Fp4Call` once it has read a configuration with an "fp4" section, builds
the engine with the configuration and the optimizer that the call holds, and lets it finish. That
is `initialize_with_fp4` cut in two where DeepSpeed's own lines stand. In AutoTP it calls
tensor_parallel.keep_fp4.

Importing this package arms the run-time hook. A call that arrives here has not come through it,
so the patch does its work and the hook is taken back; through the hook there is nothing to do here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fp4_plugin.integrations.deepspeed.hook import disarm
from fp4_plugin.integrations.deepspeed.initialization import (
    finish_engine,
    is_serving,
    parsed_section,
)
from fp4_plugin.integrations.deepspeed.optimizer import known_to_deepspeed, prepare_optimizer

__all__ = ["Fp4Call"]

_names = contextlib.ExitStack()


class Fp4Call:
    """One call of `deepspeed.initialize`; `config` and `optimizer` are to be used instead.

    config: the resolved configuration; optimizer, mpu: as the caller gave them. Raises ConfigError
    for a wrong section, a conflicting feature, an optimizer that cannot keep states as asked.
    """

    def __init__(self, config: Mapping[str, Any], optimizer: Any, mpu: Any) -> None:
        self._is_ours = not is_serving()
        self._mpu = mpu
        arguments = {"config": config, "optimizer": optimizer}
        if self._is_ours:
            disarm()
            self._section = parsed_section(config)
            prepare_optimizer(arguments, config, self._section)
            _names.close()  # of a call that DeepSpeed refused
            _names.enter_context(known_to_deepspeed())
        self.config = arguments["config"]
        self.optimizer = arguments["optimizer"]

    def finish(self, engine: Any) -> None:
        """Convert `engine`, which DeepSpeed has just built. Raises as `initialize_with_fp4`."""
        if self._is_ours:
            _names.close()
            finish_engine(engine, self._section, self._mpu)
