"""The settings that name a device."""

from collections.abc import Mapping, Sequence

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.settings import Settings
from dovetail.workers.devices.registry import entry_of, known

OTHERS: Mapping[str, Sequence[str]] = {
    "target.device": (),
    "target.split.device": ("",),
    "target.prefill": ("auto", "local"),
    "draft.device": ("auto",),
}
"""The settings that name a device -> their other values."""


def check_devices(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse a setting that does not name a device; `SettingsError` has its name, value and origin.
    The worker finds out whether the device exists."""
    target, draft = settings.target, settings.draft
    given = (target.device, target.split.device, target.prefill, draft.device)
    for (name, others), value in zip(OTHERS.items(), given, strict=True):
        if value in others or entry_of(value) is not None:
            continue
        words = known(*filter(None, others))
        empty = ", or leave it empty" if "" in others else ""
        raise SettingsError(f"{name} = {value!r} ({origins[name]}): write {words}{empty}")
