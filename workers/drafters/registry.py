"""The table of drafters: for each kind of draft, how to open a draft worker from settings. A
drafter with a model imports torch when it is opened; others never do."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.protocol.messages import MAX_SESSIONS, MAX_TOKENS
from dovetail.protocol.settings import HEAD_KINDS, SUBSTITUTE_WEIGHTS, CacheSettings, DraftSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.draft import DraftWorker, Identity
from dovetail.workers.drafters.ngram import Lookup
from dovetail.workers.sessions.prefix_cache import affordable_tokens

if TYPE_CHECKING:
    from dovetail.protocol.grammar import GrammarVocabulary
    from dovetail.workers.devices.base import Device
    from dovetail.workers.drafters.translation import Translation
    from dovetail.workers.heads.head import Head
    from dovetail.workers.models.language_model import LanguageModel

NO_PROMPTS = CacheSettings(memory="0")


@dataclass(frozen=True)
class Wanted:
    """The draft worker to open."""

    settings: DraftSettings
    name: str
    threads: int
    target: str  # folder or hub id of its target
    context: int | None = None
    """The model's longest sequence, in tokens; None: the model's own limit."""
    profile: Path | None = None  # this machine's profile file
    cache: Path | None = None  # the folder of the cache of quantised weights
    tell: Callable[[int, int], None] = lambda _done, _all: None
    """Receives the progress of quantising."""
    prompts: CacheSettings = NO_PROMPTS  # the memory and disk space for cached prompts
    vram: int | None = None  # bytes of a GPU that it may use; None: all free memory

    def open_device(self) -> "Device":
        """Return the device of the settings, limited to the memory that may be used."""
        from dovetail.workers.devices.memory import HELD, limit_memory
        from dovetail.workers.devices.opening import open_device

        device = open_device(self.settings.device, self.threads)
        if self.vram is not None and device.is_cpu:
            HELD.tell("memory.vram has no effect: the draft is on the CPU")
        limit_memory(device, self.vram)
        return device

    def identity(
        self,
        model: "LanguageModel | Head",
        device: "Device",
        called: str,
        arithmetic: str,
        *,
        known: int = 0,
        **more: Any,
    ) -> Identity:
        """Return the registration of a worker with a model on a device. `arithmetic`: what computes
        its rows; `known`: how many tokens after a row it depends on."""
        from dovetail.workers.drafters.levels import known_levels
        from dovetail.workers.sessions.opening import open_blocks
        from dovetail.workers.sessions.room import base_rows

        cache = model.new_cache(0)
        seed = (model.checkpoint_digest, model.weights, self.settings.kind, arithmetic)
        return Identity(
            self.name,
            called,
            device.name,
            self.threads,
            weights=model.weights,
            curves=known_levels(self.profile, model, device.library),
            kept_tokens=affordable_tokens(device.free_bytes(), cache.row_bytes),
            kept_extra=base_rows(cache),
            together=MAX_SESSIONS,
            blocks=open_blocks(
                self.prompts, self.name, called, model.new_cache, model.device, *seed, known=known
            ),
            **more,
        )


def open_draft_worker(
    settings: DraftSettings,
    *,
    name: str,
    threads: int,
    target: str,
    context: int | None = None,
    profile: Path | None = None,
    cache: Path | None = None,
    tell: Callable[[int, int], None] = lambda _done, _all: None,
    vram: int | None = None,
    prompts: CacheSettings = NO_PROMPTS,
) -> DraftWorker[Any]:
    """Open the draft worker of `settings`: n-gram lookup, the small model or head in
    `settings.model` (folder or hub id), or a low-bit substitute of `target`. `Wanted` describes the
    other arguments."""
    wanted = Wanted(settings, name, threads, target, context, profile, cache, tell, prompts, vram)
    if settings.kind == "none":
        raise SettingsError(
            "draft.kind is 'none': there is no draft worker to start; choose 'auto', 'small' "
            "or 'ngram'"
        )
    worker = _open_on_device(wanted)
    worker.engine.vocabulary = _vocabulary(wanted, worker)
    return worker


def _vocabulary(
    wanted: Wanted, worker: DraftWorker[Any]
) -> "Callable[[], GrammarVocabulary] | None":
    """Return how to make the target's vocabulary for grammars: from the target's files, or from
    those of a draft that has the same one. None: neither are on this machine."""
    from dovetail.workers.models.checkpoints.hub import local_folder

    for source in (wanted.target, wanted.settings.model if worker.has_vocabulary else ""):
        with suppress(CheckpointError):
            if (found := local_folder(source)) is not None:
                return cache(partial(_made, found))
    return None


def _made(folder: Path) -> "GrammarVocabulary":
    from dovetail.protocol.grammar import GrammarVocabulary
    from dovetail.workers.models.checkpoints.tokenizer import read_language

    _, table, facts = read_language(folder)
    return GrammarVocabulary.of(table, facts)


def _open_on_device(wanted: Wanted) -> DraftWorker[Any]:
    """Open a draft on the device of the settings, or where it fits."""
    settings, name, profile, target = wanted.settings, wanted.name, wanted.profile, wanted.target
    opener = OPENERS[settings.kind]
    if settings.device != "auto" or opener is _open_ngram:
        return _opened(opener, wanted)
    from dovetail.workers.drafters.trial import fall_key, open_where_it_fits, remember_fall

    def there(device: str) -> Wanted:
        return replace(wanted, settings=settings.model_copy(update={"device": device}))

    def remember(device: str, why: str) -> None:
        try:
            opened = there(device).open_device()
        except SettingsError:  # planning reports that
            return
        remember_fall(profile, fall_key(settings, target, opened), why)

    return open_where_it_fits(name, lambda device: opener(there(device)), remember)


def _opened(opener: "Opener", wanted: Wanted) -> DraftWorker[Any]:
    """Open a draft on the device of the settings. Raises `SettingsError` if its memory is too
    small."""
    try:
        return opener(wanted)
    except (MemoryError, RuntimeError) as error:
        from dovetail.workers.devices.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        settings = wanted.settings
        remedy = "smaller draft.weights or a smaller draft"
        if settings.device != "cpu":
            remedy += ", or set draft.device to 'cpu'"
        raise SettingsError(
            f"the draft {settings.model or settings.kind} does not fit into the memory of "
            f"{settings.device} (draft.device): use {remedy}"
        ) from error


def _open_ngram(wanted: Wanted) -> DraftWorker[Any]:
    return DraftWorker(Lookup(), Identity(wanted.name, "ngram", "cpu", 1, MAX_TOKENS), Spans())


def _open_folder(wanted: Wanted) -> DraftWorker[Any]:
    """Open the model in the folder. Raises `SettingsError` if the settings name another kind."""
    settings = wanted.settings
    if settings.weights in ("int3", "int2"):
        raise SettingsError(
            f"draft.weights = {settings.weights!r} is for a draft of kind 'substitute': set "
            "draft.kind to it, or use int4, int8, fp16 or bf16"
        )
    if not settings.model:
        raise SettingsError(
            "draft.model is empty: name the folder or the hub id of a smaller model of the "
            "target's family or of a head for it, or choose draft.kind 'ngram'"
        )
    from dovetail.workers.heads.files import classify  # torch is imported here
    from dovetail.workers.heads.registry import setting_of

    kind = classify(settings.model, allow_bin=settings.pickled)
    found, words = "small", "an ordinary language model (kind 'small')"
    if kind is not None:
        found = setting_of(kind)
        words = f"a head of kind {found!r}"
    if settings.kind not in ("auto", found):
        raise SettingsError(
            f"draft.kind = {settings.kind!r}, but {settings.model} is {words}: "
            "leave draft.kind out, or name another folder"
        )
    if kind == "mtp":
        return _open_mtp(wanted)
    return _open_small(wanted) if kind is None else _open_head(wanted)


def _open_substitute(wanted: Wanted) -> DraftWorker[Any]:
    from dovetail.workers.drafters.model import SUBSTITUTE_SHARPENING
    from dovetail.workers.models.substitutes.coded import against_codes
    from dovetail.workers.models.substitutes.substitute import load_substitute

    settings = wanted.settings
    if settings.model:
        raise SettingsError(
            "draft.kind = 'substitute' is made from the target, but draft.model names "
            f"{settings.model!r}: leave one of the two out"
        )
    if settings.weights not in SUBSTITUTE_WEIGHTS:
        raise SettingsError(
            f"draft.weights = {settings.weights!r} is not a type of a substitute's weights: use "
            "int8, int4, int3 or int2"
        )
    device = wanted.open_device()
    weights = "int4" if settings.weights == "auto" else settings.weights
    if why_not := against_codes(device.torch_device, weights):
        raise SettingsError(
            f"draft.kind = 'substitute' is not possible on {device.name}: {why_not}; set "
            "draft.device to 'cpu', or choose another draft.kind"
        )
    model, made = load_substitute(
        wanted.target,
        weights=weights,
        device=str(device.torch_device),
        context=wanted.context,
        folder=wanted.cache,
        tell=wanted.tell,
    )
    if said := made.report(wanted.name):
        print(said, file=sys.stderr)
    called = f"{model.checkpoint.source} ({weights} substitute)"
    return _model_worker(wanted, model, device, called, sharpening=SUBSTITUTE_SHARPENING)


def _small_weights(wanted: Wanted, device: "Device") -> str:
    """Return the type of a small model's weights for a device: the file's own blocks if they can be
    multiplied there, otherwise on a GPU the fastest type."""
    from dovetail.workers.models.backends.device.own_blocks import against_blocks
    from dovetail.workers.models.checkpoints.gguf.view import described_tensors
    from dovetail.workers.models.checkpoints.hub import find_folder

    folder = find_folder(wanted.settings.model)
    if device.is_cpu:
        return device.draft_weights
    described = described_tensors(folder).values()
    if not (types := {tensor.type for tensor in described if tensor.packed_bytes}):
        return _fastest(wanted, device)
    if not (why_not := against_blocks(device.torch_device, types)):
        return "stored"
    weights = _fastest(wanted, device)
    said = f"{wanted.settings.model} is converted to {weights} instead of staying in blocks"
    print(f"{wanted.name}: {said}: {why_not}", file=sys.stderr)
    return weights


def _fastest(wanted: Wanted, device: "Device", excluded: Mapping[str, str] | None = None) -> str:
    """Return the type of weights in which a small model is fastest on a GPU, and report it.
    `excluded`: types that may not be used -> why."""
    from dovetail.workers.drafters.weights import chosen_type
    from dovetail.workers.models.checkpoints.footprint import read_tensors, type_of_matrices
    from dovetail.workers.models.checkpoints.hub import find_folder

    stored = type_of_matrices(read_tensors(find_folder(wanted.settings.model)))
    chosen = chosen_type(device, stored, wanted.profile, excluded=excluded)
    print(f"{wanted.name}: {chosen.said}", file=sys.stderr)
    return chosen.weights


def _open_small(wanted: Wanted) -> DraftWorker[Any]:
    from dovetail.workers.drafters.translation import described, open_translation
    from dovetail.workers.drafters.weights import OVERFLOWS, check_type, within_fp16
    from dovetail.workers.models.loading import load_language_model
    from dovetail.workers.models.remembered import tell_proof

    settings = wanted.settings
    if isinstance(settings.head_rows, int):
        raise SettingsError(
            f"draft.head_rows = {settings.head_rows}, but {settings.model} is a language model, "
            "not a draft head: leave draft.head_rows out"
        )
    translation = open_translation(settings.model, wanted.target)
    device = wanted.open_device()

    def load(weights: str) -> "LanguageModel":
        return load_language_model(
            settings.model,
            weights=weights,
            device=str(device.torch_device),
            proof=settings.proof,
            draft=device,
        )

    check_type(device, settings.weights)
    chosen = settings.weights == "auto"
    weights = _small_weights(wanted, device) if chosen else settings.weights
    found = within_fp16(lambda: load("fp16")) if chosen and weights == "fp16" else load(weights)
    model = found or load(_fastest(wanted, device, {"fp16": OVERFLOWS}))
    tell_proof(model.proved, wanted.name)
    called = model.checkpoint.source
    if translation is not None:
        called += f" ({described(translation, model, settings.model, wanted.target)})"
    return _model_worker(wanted, model, device, called, translation=translation)


def _model_worker(
    wanted: Wanted,
    model: "LanguageModel",
    device: "Device",
    called: str,
    translation: "Translation | None" = None,
    **more: Any,
) -> DraftWorker[Any]:
    """Return the draft worker of a language model, named `called`, which registers with the
    vocabulary that it proposes in; `more`: arguments of `Drafter`."""
    from dovetail.workers.drafters.model import Drafter
    from dovetail.workers.models.backends.device.choice import tell_products

    if not device.is_cpu:
        tell_products(device.torch_device, wanted.name)
    checkpoint, spans = model.checkpoint, Spans()
    vocabulary, table = checkpoint.vocabulary, checkpoint.table
    if translation is not None:
        vocabulary, table = translation.facts, translation.table
    identity = wanted.identity(
        model,
        device,
        called,
        " ".join((model.backend, model.kernels, model.cache)),
        context=model.context,
        vocabulary=vocabulary,
        table=table,
    )
    ahead, merges = wanted.settings.ahead is not False, wanted.settings.merge_lookup
    engine = Drafter(model, spans, ahead=ahead, merges=merges, translation=translation, **more)
    return on_device(DraftWorker(engine, identity, spans))


def _open_head(wanted: Wanted) -> DraftWorker[Any]:
    from dovetail.workers.drafters.head import HeadDrafter
    from dovetail.workers.drafters.weights import check_type, chosen_type
    from dovetail.workers.heads.block.drafter import BlockDrafter
    from dovetail.workers.heads.head import open_head
    from dovetail.workers.heads.reduced.rows import FrequentRows
    from dovetail.workers.models.backends.device.choice import tell_products

    settings = wanted.settings
    device = wanted.open_device()
    check_type(device, settings.weights)

    @cache
    def choose_type(stored: str) -> str:
        chosen = chosen_type(device, stored, wanted.profile)
        print(f"{wanted.name}: {chosen.said}", file=sys.stderr)
        return chosen.weights

    head = open_head(
        settings.model,
        target=wanted.target,
        weights=settings.weights,
        device=str(device.torch_device),
        allow_bin=settings.pickled,
        choose_type=choose_type,
        output=(output := FrequentRows(settings.head_rows, wanted.target)),
    )
    if head.reduced is not None:
        size = f"{head.reduced} of {head.vocabulary_size} rows (draft.head_rows)"
        print(f"{wanted.name}: the output head has {size}", file=sys.stderr)
    if head.said:
        print(f"{wanted.name}: {head.said}", file=sys.stderr)
    if not device.is_cpu:
        tell_products(device.torch_device, wanted.name)
    if settings.contrast is True and not head.spec.contrast:
        raise SettingsError(
            f"draft.contrast = true, but the {head.spec.kind} head {settings.model} has no "
            "contrast output: leave draft.contrast out"
        )
    spans = Spans()
    contrast = head.spec.contrast and settings.contrast is not False
    engine = (
        BlockDrafter(head, spans, merges=settings.merge_lookup)
        if head.spec.block
        else HeadDrafter(
            *(head, spans),
            contrast=contrast,
            capture=device.capture,
            ahead=settings.ahead is not False,
            merges=settings.merge_lookup,
        )
    )
    engine.counts = output.counts
    identity = wanted.identity(
        head, device, settings.model, head.arithmetic, known=1, context=MAX_TOKENS
    )
    return on_device(DraftWorker(engine, identity, spans))


def _open_mtp(wanted: Wanted) -> DraftWorker[Any]:
    from dovetail.protocol.profile import MtpVariant, load_profile, rewrite_profile
    from dovetail.workers.drafters.weights import check_type
    from dovetail.workers.heads.mtp.drafter import MtpDrafter
    from dovetail.workers.heads.mtp.layers import open_mtp
    from dovetail.workers.heads.reduced.rows import FrequentRows

    settings = wanted.settings
    device = wanted.open_device()
    check_type(device, settings.weights)
    target = replace(wanted, settings=settings.model_copy(update={"model": wanted.target}))
    weights = _small_weights(target, device) if settings.weights == "auto" else settings.weights
    head = open_mtp(
        settings.model or wanted.target,
        target=wanted.target,
        weights=weights,
        device=device,
        context=wanted.context,
        reduced=(reduced := FrequentRows(settings.head_rows, wanted.target)),
    )
    spans, profile, key = Spans(), wanted.profile, head.checkpoint_digest
    known = () if profile is None or head.probed else load_profile(profile).variants
    for variant in known:
        if variant.key == key:
            head.raw, head.probed = variant.raw, True

    def remember(raw: bool) -> None:
        if profile is not None:
            rewrite_profile(profile, lambda known: known.holding(MtpVariant(key=key, raw=raw)))

    engine = MtpDrafter(
        *(head, spans),
        found=remember,
        contrast=False,
        ahead=settings.ahead is not False,
        merges=settings.merge_lookup,
    )
    engine.counts = reduced.counts
    called = settings.model or f"the MTP layer of {wanted.target}"
    identity = wanted.identity(
        head, device, called, head.arithmetic, known=1, context=head.spec.context
    )
    return on_device(DraftWorker(engine, identity, spans))


def on_device(worker: DraftWorker[Any]) -> DraftWorker[Any]:
    """Let a worker drop kept sessions when its device runs out of memory, and return it."""
    from dovetail.workers.devices.memory import HELD

    HELD.add(worker)
    return worker


Opener = Callable[[Wanted], DraftWorker[Any]]
OPENERS: dict[str, Opener] = {
    "ngram": _open_ngram,
    "substitute": _open_substitute,
    "auto": _open_folder,
    "small": _open_folder,
    "mtp": _open_mtp,
    **dict.fromkeys(HEAD_KINDS, _open_folder),
}
"""Every `draft.kind` but `none`."""
