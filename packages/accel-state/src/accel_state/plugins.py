"""Plugins: what installed packages register in the entry-point groups of this project.

`PluginGroup` is the one class for all groups: backends, device families, trackers, launchers, commands, checkpoint
stores. A group promises:

- Finding imports nothing. `importlib.metadata` reads and parses the metadata of every distribution; this module looks
  only at the `entry_points.txt` files on `sys.path` that mention one of our groups, which is about fifty times faster.
- A plugin that cannot be loaded affects no other one. It is listed with its traceback, and only its use is an error.
- While a plugin is imported, it cannot end the process. In a command, which uses `output_protected`, neither the plugin
  nor a C library or process that it starts can write into the output.
- The names of plugins are printable text: characters that control a terminal are escaped.
- What can go wrong has one text for all groups: an unknown name (`SettingError`), a name that several packages provide,
  a broken plugin, an object of the wrong type, name or version of the interface (`PluginError`), and a requirement that
  is not installed (`Missing`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

from accel_state.errors import AccelError, Missing, PluginError, SettingError
from accel_state.library import OWN_PACKAGES, add_library
from accel_state.settings.installed import folder_names

__all__ = (
    "Interface",
    "LoadedPlugin",
    "Plugin",
    "PluginGroup",
    "check_targets",
    "contained",
    "forget_plugins",
    "output_protected",
    "plugins_of",
)

T = TypeVar("T")

_GROUP_HEADING_PREFIX: Final = "[accel."

_STDOUT_FD: Final = 1
_STDERR_FD: Final = 2
"""File descriptors of the standard streams."""


class Plugin(NamedTuple):
    """One entry point: `name = target` in a group of a distribution.

    Args:
        group: for example "accel.backends".
        name: the name with which users select it.
        target: "module:attribute".
        origin: name and version of the distribution, such as "accel-plugins 0.1.0"; empty if it is unknown.
    """

    group: str
    name: str
    target: str
    origin: str

    @property
    def package(self) -> str:
        """Name of the distribution, or of the module's top-level package if the distribution is unknown."""
        return self.origin.split(" ")[0] or self.target.partition(":")[0].partition(".")[0]

    @property
    def is_own(self) -> bool:
        """Whether a package of this project provides it."""
        return self.target.partition(":")[0].partition(".")[0] in OWN_PACKAGES

    @property
    def described(self) -> str:
        """The target and the distribution, for messages."""
        return f"{self.target} of {self.origin}" if self.origin else self.target

    def load(self) -> Any:
        """Import the module and return the attribute; import errors propagate. See `contained`."""
        import importlib

        module, _, attribute = self.target.partition(":")
        add_library(module.partition(".")[0])
        with contained():
            attribute_value: Any = importlib.import_module(module)
            for part in attribute.split(".") if attribute else ():
                attribute_value = getattr(attribute_value, part)
        return attribute_value


class Interface:
    """What the objects that plugins name must be.

    Args:
        instance_of: the class of the objects.
        subclass_of: the base class, if the objects are classes.
        members: names of the attributes and methods of the objects.
        named: whether the objects have the attribute `name`, which equals the name of the entry point.
        called: whether the plugin names a class or a function without arguments that creates the object.
        versions: the oldest and the newest version of the interface that this release supports; the objects then have
            an attribute `protocols` with the versions that they support.
    """

    def __init__(
        self,
        instance_of: type | None = None,
        subclass_of: type | None = None,
        members: tuple[str, ...] = (),
        named: bool = False,
        called: bool = False,
        versions: tuple[int, int] | None = None,
    ) -> None:
        self.instance_of, self.subclass_of, self.members = instance_of, subclass_of, members
        self.named, self.called, self.versions = named, called, versions

    def fault(self, plugin: Plugin, value: Any, noun: str) -> str:
        """What is wrong with a loaded object, in one sentence; empty if nothing is."""
        if value is None and self.instance_of is None:
            return f"{plugin.described} is None."
        if self.instance_of is not None and not isinstance(value, self.instance_of):
            return f"{plugin.described} is a {type(value).__name__}, not a {self.instance_of.__name__}."
        if self.subclass_of is not None and not (isinstance(value, type) and issubclass(value, self.subclass_of)):
            return f"{plugin.described} is not a subclass of {self.subclass_of.__name__}."
        lacking = [member for member in self.members if not hasattr(value, member)]
        if lacking:
            return f"{plugin.described} has no {' and no '.join(lacking)}."
        if self.named and value.name != plugin.name:
            return f"{plugin.described} has the name {value.name!r}, but its entry point has the name {plugin.name!r}."
        if self.versions is not None:
            oldest, newest = value.protocols
            if newest < self.versions[0] or oldest > self.versions[1]:
                supported, needed = _versions(oldest, newest), _versions(*self.versions)
                return (
                    f"{plugin.described} supports {supported} of the {noun} interface; this release supports {needed}."
                )
        return ""


_ANY_INTERFACE: Final = Interface()


def _versions(oldest: int, newest: int) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


class LoadedPlugin(Generic[T]):
    """A plugin, loaded as far as possible.

    Args:
        plugin: its entry point.
        noun: what it is, for messages, such as "backend".
        value: the object that it names; None if it is broken.
        failure: why it is broken: a traceback, or a sentence; empty if it is not.
        cause: the exception of the traceback.
        remedy: what to do if it is broken; by default to repair the package.
        settings: the settings class of a manifest; see `with_settings`.
    """

    def __init__(
        self,
        plugin: Plugin,
        noun: str,
        value: T | None = None,
        failure: str = "",
        cause: Exception | None = None,
        remedy: str = "",
        settings: type | None = None,
    ) -> None:
        self.plugin, self.noun, self.value, self.settings = plugin, noun, value, settings
        self.failure, self.cause = failure, cause
        self.remedy = remedy or f"Repair, update or remove {plugin.package}."

    @property
    def name(self) -> str:
        """The name with which users select it."""
        return self.plugin.name

    @property
    def origin(self) -> str:
        """Name and version of the distribution."""
        return self.plugin.origin

    @property
    def reason(self) -> str:
        """Why it is broken, in one line; empty if it is not."""
        if self.cause is None:
            return self.failure
        from accel_state.untrusted import printable

        return printable(f"{type(self.cause).__name__}: {' '.join(str(self.cause).split())}")

    @property
    def unmet(self) -> str:
        """The first requirement that is not met, in one sentence; empty if all are met."""
        obstacles = (requirement.obstacle() for requirement in getattr(self.value, "requires", ()))
        return next((obstacle for obstacle in obstacles if obstacle is not None), "")

    @property
    def obstacle(self) -> str:
        """Why it cannot be used, in one line: a requirement is not met, or it is broken. Empty if it can be used."""
        return self.unmet or self.reason

    @property
    def fault(self) -> str:
        """The text about a broken plugin in every error, warning and report; empty if it is not broken."""
        return self.failure if self.cause is None else f"{self.plugin.described} could not be loaded: {self.reason}"

    @property
    def warning(self) -> str:
        """The text about a broken plugin that is left out."""
        return f"The {self.noun} {self.name!r} is ignored. {self.fault}"

    def error(self, failure: str) -> AccelError | None:
        """The error for a plugin that cannot be used, or None.

        Args:
            failure: what fails without it, as the first part of the error.

        Returns:
            A `Missing` for a requirement that is not met; a `PluginError` for a broken plugin.
        """
        for requirement in getattr(self.value, "requires", ()):
            missing: Missing | None = requirement.error(failure)
            if missing is not None:
                return missing
        return self._broken(failure) if self.failure else None

    def get(self, failure: str) -> T:
        """The object; its requirements are not checked.

        Args:
            failure: what fails without it, as the first part of the error.

        Raises:
            PluginError: the plugin is broken.
        """
        if self.value is None or self.failure:
            raise self._broken(failure) from self.cause
        return self.value

    def usable(self, failure: str) -> T:
        """The object, whose requirements are met.

        Args:
            failure: what fails without it, as the first part of the error.

        Raises:
            PluginError: the plugin is broken.
            Missing: a package that it requires is not installed, or has another version.
        """
        error = self.error(failure)
        if error is not None:
            raise error from self.cause
        return self.get(failure)

    def with_settings(self, target: str) -> LoadedPlugin[T]:
        """This plugin with the settings class that its manifest names as "module:class"; broken without it."""
        if self.failure or not target:
            return self
        interface = Interface(instance_of=type, members=("__dataclass_fields__",))
        part: LoadedPlugin[type] = _load(self.plugin._replace(target=target), self.noun, interface)
        return LoadedPlugin(self.plugin, self.noun, self.value, part.failure, part.cause, settings=part.value)

    def _broken(self, failure: str) -> PluginError:
        return PluginError(failure, self.fault, self.remedy)


class PluginGroup(Generic[T]):
    """All plugins of one entry-point group.

    Args:
        group: the name of the group.
        noun: what one plugin is, for messages.
        plural: what several of them are; by default the noun with an "s".
        interface: what the objects must be.
        own: which plugin is used if a package of this project and another package provide the same name: "first" for
            ours, "last" for the other one, "equal" for neither, which is an error.
        built_in: plugins that are found without the metadata of a package.

    Example:
        >>> families = PluginGroup("accel.devices", "device family", "device families")
        >>> "cpu" in families.names()
        True
        >>> families.find("cqu", "Cannot use the device 'cqu'.")
        Traceback (most recent call last):
        accel_state.errors.SettingError: Cannot use the device 'cqu'.
          Installed device families: cpu, cuda, hpu, mlu, mps, musa, neuron, npu, sdaa, xla, xpu.
          Did you mean 'cpu'?
    """

    def __init__(
        self,
        group: str,
        noun: str,
        plural: str = "",
        interface: Interface = _ANY_INTERFACE,
        own: str = "equal",
        built_in: tuple[Plugin, ...] = (),
    ) -> None:
        self.group, self.noun, self.plural = group, noun, plural or f"{noun}s"
        self.interface, self.own, self.built_in = interface, own, built_in
        self._scan: tuple[Plugin, ...] | None = None
        self._loaded: tuple[LoadedPlugin[T], ...] = ()

    def plugins(self) -> tuple[Plugin, ...]:
        """The plugins in the order of `sys.path`, without those that others replace; imports none of them."""
        plugins = (*self.built_in, *plugins_of(self.group))
        if self.own == "equal":
            return plugins
        preferred = {plugin.name for plugin in plugins if plugin.is_own == (self.own == "first")}
        return tuple(
            plugin for plugin in plugins if plugin.is_own == (self.own == "first") or plugin.name not in preferred
        )

    def names(self) -> tuple[str, ...]:
        """Names of the plugins, sorted, each once; imports none of them."""
        return tuple(sorted({plugin.name for plugin in self.plugins()}))

    def loaded(self) -> tuple[LoadedPlugin[T], ...]:
        """Every plugin, sorted by name and loaded as far as possible.

        Plugins are loaded once, and again after a change of `sys.path` and after `forget_plugins`.
        """
        scan = _scan(tuple(sys.path))
        if scan is not self._scan:
            self._loaded = tuple(sorted(map(self.load, self.plugins()), key=lambda loaded: loaded.name))
            self._scan = scan
        return self._loaded

    def values(self) -> list[T]:
        """The objects of the plugins that are not broken, sorted by the names of the plugins."""
        return [plugin.value for plugin in self.loaded() if plugin.value is not None]

    def load(self, plugin: Plugin) -> LoadedPlugin[T]:
        """One plugin of the group, loaded as far as possible; broken if several packages provide its name."""
        rivals = [rival.origin for rival in self.plugins() if rival.name == plugin.name]
        if len(rivals) > 1:
            failure = f"Several packages provide this {self.noun}: {', '.join(rivals)}."
            return LoadedPlugin(plugin, self.noun, failure=failure, remedy="Uninstall all but one of them.")
        return _load(plugin, self.noun, self.interface)

    def find(self, name: str, failure: str, others: Iterable[str] = ()) -> LoadedPlugin[T]:
        """The plugin with a name, loaded as far as possible.

        Args:
            name: its name.
            failure: what fails without it, as the first part of an error, such as "Cannot use the tracker 'x'."
            others: further valid names, for the text of the error.

        Raises:
            SettingError: no plugin has the name; the error contains the most similar one.
        """
        for plugin in self.plugins():
            if plugin.name == name:
                return self.load(plugin)
        raise self.unknown(name, failure, (*self.names(), *others))

    def part(self, name: str, target: str, interface: Interface = _ANY_INTERFACE) -> LoadedPlugin[Any]:
        """Another object of a plugin, which its manifest names, loaded as far as possible.

        Args:
            name: the name of the plugin, which may be registered without being installed.
            target: the object as "module:attribute".
            interface: what the object must be.
        """
        plugins = (plugin for plugin in self.plugins() if plugin.name == name)
        plugin = next(plugins, Plugin(self.group, name, target, ""))
        return _load(plugin._replace(target=target), self.noun, interface)

    def unknown(self, name: str, failure: str, names: Iterable[str]) -> SettingError:
        """The error for a name that no plugin has.

        Args:
            name: the name.
            failure: what fails without the plugin, as the first part of the error.
            names: the valid names.
        """
        from accel_state.settings.schema import closest

        valid = sorted(set(names))
        near = closest(name, valid)
        return SettingError(
            failure,
            f"Installed {self.plural}: {', '.join(valid) or 'none'}.",
            f"Did you mean {near!r}?" if near else "Use one of these, or install the package that provides it.",
        )


def check_targets(noun: str, name: str, required: Mapping[str, str], optional: Mapping[str, str | None]) -> None:
    """Check that fields of a manifest name objects in modules, such as "package.module:Name".

    Args:
        noun: what the manifest declares, such as "backend".
        name: its name.
        required: fields that must name an object.
        optional: fields that may be empty or None.

    Raises:
        PluginError: a field does not.

    Example:
        >>> check_targets("backend", "fancy", {"strategy": "fancy.strategy:Fancy"}, {"config": ""})
    """
    for field, target in (*required.items(), *optional.items()):
        module, _, attribute = (target or "").partition(":")
        if not (target or field in required) or all(map(str.isidentifier, (*module.split("."), *attribute.split(".")))):
            continue
        raise PluginError(
            f"Cannot use {field}={target!r} in the manifest of the {noun} {name!r}.",
            "The value does not name an object in a module.",
            "Write it as 'package.module:Name'.",
        )


def _load(plugin: Plugin, noun: str, interface: Interface) -> LoadedPlugin[Any]:
    try:
        value = plugin.load()
        if interface.called:
            with contained():
                value = value()
        fault = interface.fault(plugin, value, noun)
    except Exception as error:
        import traceback

        from accel_state.untrusted import printable

        return LoadedPlugin(plugin, noun, None, printable(traceback.format_exc(), keep="\n\t"), error)
    return LoadedPlugin(plugin, noun, None if fault else value, fault)


@contextmanager
def contained() -> Iterator[None]:
    """Run code of a plugin, so that it cannot end this process; see `output_protected` for what it writes.

    An interrupt by the user ends the process as always.

    Raises:
        ImportError: the code called `sys.exit`, or raised another exception that is not an error.
    """
    with _interrupts() as interrupts, _output_to_errors() if _is_output_protected else nullcontext():
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if interrupts:
                raise
            shown = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raise {error!r}"
            raise ImportError(f"Its code tried to end this process with: {shown}") from error


_is_output_protected = False


@contextmanager
def output_protected() -> Iterator[None]:
    """In this block, what code of plugins writes to standard output goes to standard error.

    It is for programs whose output other programs read, such as `accel`. Other processes keep their standard output:
    redirecting it would also redirect their other threads, and children that a plugin starts.
    """
    global _is_output_protected
    before, _is_output_protected = _is_output_protected, True
    try:
        yield
    finally:
        _is_output_protected = before


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """Redirect the file descriptor, because C libraries and child processes do not write to `sys.stdout`.

    `sys.stdout` itself stays as it is: a module may keep it, for example for a handler of `logging`.
    """
    sys.stdout.flush()
    output = os.dup(_STDOUT_FD)
    try:
        os.dup2(_STDERR_FD, _STDOUT_FD)
        yield
    finally:
        with suppress(AttributeError, OSError, ValueError):
            # The plugin may have closed or replaced it.
            sys.stdout.flush()
        os.dup2(output, _STDOUT_FD)
        os.close(output)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The interrupts that this process receives in the block; an exception alone does not tell who raised it."""
    import signal

    received: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: Any) -> None:
        received.append(number)
        if callable(before):
            before(number, frame)

    try:
        if callable(before):
            signal.signal(signal.SIGINT, interrupted)
    except ValueError:
        # Only the main thread handles signals.
        yield received
        return
    try:
        yield received
    finally:
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, before)


def plugins_of(group: str) -> tuple[Plugin, ...]:
    """Entry points of a group in the order of `sys.path`; those with the same name and target are listed once."""
    return tuple(plugin for plugin in _scan(tuple(sys.path)) if plugin.group == group)


def forget_plugins() -> None:
    """Search again at the next call, because the running process has installed a package."""
    _scan.cache_clear()


@lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    plugins: dict[tuple[str, str, str], Plugin] = {}
    for folder in dict.fromkeys(path):
        for origin, text in _metadata(folder or os.curdir):
            for plugin in _parse(text, origin):
                plugins.setdefault((plugin.group, plugin.name, plugin.target), plugin)
    return tuple(plugins.values())


def _metadata(folder: str) -> Iterator[tuple[str, str]]:
    """Origin and text of each entry-point file in a folder that mentions one of our groups."""
    for name in sorted(name for name in folder_names(folder) if name.endswith((".dist-info", ".egg-info"))):
        try:
            # Without file objects and decoding: most of the hundreds of files do not mention our groups.
            file = os.open(f"{folder}/{name}/entry_points.txt", os.O_RDONLY)
        except OSError:
            continue
        try:
            content = os.read(file, os.fstat(file).st_size)
            text = content.decode() if _GROUP_HEADING_PREFIX.encode() in content else ""
        except (OSError, UnicodeDecodeError):
            continue
        finally:
            os.close(file)
        if text:
            distribution, _, version = name.rsplit(".", 1)[0].rpartition("-")
            yield f"{distribution.replace('_', '-')} {version}", text


def _parse(text: str, origin: str) -> Iterator[Plugin]:
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group.startswith(_GROUP_HEADING_PREFIX[1:]) and "=" in line and not line.startswith(("#", ";")):
            name, _, target = line.partition("=")
            texts = (group, name.strip(), target.split("[")[0].strip(), origin)
            yield Plugin(*texts if all(map(str.isprintable, texts)) else map(_escaped, texts))


def _escaped(text: str) -> str:
    from accel_state.untrusted import printable

    return printable(text)
