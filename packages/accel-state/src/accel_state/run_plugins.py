"""The engine configurations that a run was made with, as `AcceleratorState` shows them.

This layer knows none of their classes: it keeps the objects that it was given, under the names of the parameters, and
passes on to several DeepSpeed configurations which of them is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accel_state import current
from accel_state.errors import NoState, NotReady, SettingError

__all__ = ("PLUGINS", "RunPlugins")

PLUGINS: Final = ("dynamo_plugin", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin")
"""Parameters of `AcceleratorState` under which a run keeps configurations."""

_ONLY: Final = "default"
"""Name of a DeepSpeed configuration that was given without one."""


def _show(name: str, plugin: Any) -> None:
    run = current.run()
    current.set_run(run._replace(given={**run.given, name: plugin}))


def _given(name: str) -> Any:
    """What was given or assigned under a name.

    Raises:
        NoState: nothing was; other libraries ask by `hasattr` whether a run has such a configuration.
    """
    given = current.run().given
    if name not in given:
        raise NoState(
            f"AcceleratorState.{name} was read.",
            f"The run was made without a {name}.",
            f"Give the Accelerator a {name}, or ask with hasattr(state, {name!r}).",
        )
    return given[name]


class RunPlugins:
    """The properties of a state that show what the run was given.

    Without one, `fsdp_plugin` and `megatron_lm_plugin` are no attributes, and the others are None.

    Other libraries assign them: all states show then what was assigned, while the strategy keeps what it was made with.
    """

    @property
    def dynamo_plugin(self) -> Any:
        """How models are compiled."""
        return current.run().given.get("dynamo_plugin")

    @dynamo_plugin.setter
    def dynamo_plugin(self, plugin: Any) -> None:
        _show("dynamo_plugin", plugin)

    @property
    def fsdp_plugin(self) -> Any:
        """How parameters are sharded by PyTorch; no attribute of a run that was given none."""
        return _given("fsdp_plugin")

    @fsdp_plugin.setter
    def fsdp_plugin(self, plugin: Any) -> None:
        _show("fsdp_plugin", plugin)

    @property
    def torch_tp_plugin(self) -> Any:
        """How layers are split by PyTorch."""
        return current.run().given.get("torch_tp_plugin")

    @torch_tp_plugin.setter
    def torch_tp_plugin(self, plugin: Any) -> None:
        _show("torch_tp_plugin", plugin)

    @property
    def megatron_lm_plugin(self) -> Any:
        """How Megatron-LM works; no attribute of a run that was given none."""
        return _given("megatron_lm_plugin")

    @megatron_lm_plugin.setter
    def megatron_lm_plugin(self, plugin: Any) -> None:
        _show("megatron_lm_plugin", plugin)

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by the second version of FSDP."""
        return getattr(current.run().given.get("fsdp_plugin"), "fsdp_version", None) == 2

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The DeepSpeed configurations by name."""
        given = current.run().given.get("deepspeed_plugin")
        return given if given is None or isinstance(given, Mapping) else {_ONLY: given}

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed configuration in use: the one selected last, at first the first one."""
        plugins = self.deepspeed_plugins
        return plugins[current.run().selected or next(iter(plugins))] if plugins else None

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, plugin: Any) -> None:
        _show("deepspeed_plugin", plugin)
        current.set_run(current.run()._replace(selected=None))

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed configuration of this name.

        Raises:
            NotReady: the run has none.
            SettingError: none has this name.
        """
        return self._named(name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Let the DeepSpeed configuration of this name be the one in use.

        Args:
            name: the key under which it was given.

        Raises:
            NotReady: the run has none.
            SettingError: none has this name.
        """
        chosen = self._named(name)
        for plugin in (self.deepspeed_plugins or {}).values():
            if plugin is not chosen:
                plugin.deselect()
        chosen.select(_from_accelerator_state=True)
        current.set_run(current.run()._replace(selected=name))

    def _named(self, name: str | None) -> Any:
        plugins = self.deepspeed_plugins
        if not plugins:
            raise NotReady(
                f"The DeepSpeed configuration {name!r} was asked for.",
                "The run was made without DeepSpeed.",
                "Give the Accelerator a deepspeed_plugin, or a dictionary of several.",
            )
        if name is None or name not in plugins:
            raise SettingError(
                f"The DeepSpeed configuration {name!r} was asked for.",
                "There is none of this name.",
                f"Give one of {', '.join(map(repr, plugins))}.",
            )
        return plugins[name]
