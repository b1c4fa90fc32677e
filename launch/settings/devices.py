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
"""The settings that name a device -> what else they may be."""


def check_devices(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse a setting that names no device; `SettingsError` names it, its value and where that
    comes from. Whether the device is there, its worker finds out."""
    target, draft = settings.target, settings.draft
    given = (target.device, target.split.device, target.prefill, draft.device)
    for (name, others), value in zip(OTHERS.items(), given, strict=True):
        if value in others or entry_of(value) is not None:
            continue
        words = known(*filter(None, others))
        empty = ", or leave it empty" if "" in others else ""
        raise SettingsError(f"{name} = {value!r} ({origins[name]}): write {words}{empty}")
