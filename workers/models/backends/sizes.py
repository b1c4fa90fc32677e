"""The sizes of a model's layers, states and head, from its configuration; needs no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.protocol.calibration import STATELESS, StateTraffic
from dovetail.workers.models.checkpoints.context import LONGEST, scaled_positions
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS, int4_kind

NUMBER_BYTES = 4  # bytes of states, norms and biases: fp32
WAITING = 32  # approximate number of rows whose factors a session holds, apart from a tree's
CHECKPOINT_ROWS = 4096  # rows from one checkpoint of a long session to the next (`recurrent.py`)
COLUMNS = 16  # parts of states and factors are padded to multiples of this
RECURRENT = ("linear_attention", "mamba", "conv", "hybrid")
ATTENDING = ("full_attention", "sliding_attention", "attention", "hybrid")
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # nemotron-H's kinds of layers


@dataclass(frozen=True)
class StateSizes:
    """The layers with a state of a model."""

    layers: int
    attending: int  # layers with keys and values; some may have a state too, and some neither
    given: int  # outputs of the matrix before a mixer
    taken: int  # inputs of the matrix after it
    gated: bool  # True if attention has gates, as many as numbers of queries
    state: int  # numbers of a state
    row: int  # numbers of the factors of a row

    def session_bytes(self, tree_rows: int) -> int:
        """Return a session's bytes in a layer: state, checkpoint, factors of waiting rows and a
        tree."""
        return NUMBER_BYTES * (2 * self.state + (WAITING + tree_rows) * self.row)

    @property
    def traffic(self) -> StateTraffic:
        """Return the memory traffic of a pass over rows of one session, in all layers."""
        return StateTraffic(*(NUMBER_BYTES * self.layers * part for part in (self.state, self.row)))

    @property
    def token_bytes(self) -> int:
        """Return the memory per row of a session for periodic checkpoints in one layer."""
        return -(-NUMBER_BYTES * self.state // CHECKPOINT_ROWS)


def layer_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """Return each layer's kind if a model has several kinds, or states; else ()."""
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return [PATTERN.get(letter, letter) for letter in pattern]
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list | tuple):
        return types
    if isinstance(own := config.get("linear_attn_config"), Mapping):
        layers = range(1, int(config.get("num_hidden_layers") or 0) + 1)  # counted from 1
        return ["linear_attention" if at in own["kda_layers"] else "attention" for at in layers]
    count, kind = int(config.get("num_hidden_layers") or 0), config.get("model_type")
    if kind == "falcon_h1":
        return ["hybrid"] * count
    if kind == "bamba":
        indices = config.get("attn_layer_indices") or ()
        return ["attention" if i in indices else "mamba" for i in range(count)]
    if config.get("full_attn_idxs") is not None:
        return ["attention" if i in config["full_attn_idxs"] else "conv" for i in range(count)]
    if "linear_num_value_heads" in config:
        every = int(config.get("full_attention_interval") or 4)
        return ["linear_attention" if (i + 1) % every else "attention" for i in range(count)]
    return ()


def count_layers(config: Mapping[str, Any]) -> Any:
    """Return the number of layers in a config.json, or None."""
    listed = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    return len(listed) if isinstance(listed, str | list) else config.get("num_hidden_layers")


def state_sizes(config: Mapping[str, Any]) -> StateSizes | None:
    """Return the sizes of layers with a state; None for a model without layers of a known kind."""
    kinds = layer_kinds(config)
    if not (count := sum(kind in RECURRENT for kind in kinds)):
        return None
    layers = count, sum(kind in ATTENDING for kind in kinds)
    hidden = int(config["hidden_size"])
    if "linear_num_value_heads" in config:
        key_dim, heads = int(config["linear_key_head_dim"]), int(config["linear_num_value_heads"])
        keys = int(config["linear_num_key_heads"]) * key_dim
        of_state = _of_state(keys, key_dim, heads, int(config["linear_value_head_dim"]))
        values = heads * int(config["linear_value_head_dim"])
        gated = config.get("model_type") != "olmo_hybrid"
        return StateSizes(*layers, 2 * keys + 2 * values + 2 * heads, values, gated, *of_state)
    if config.get("model_type") == "kimi_linear":
        return _by_channel(config, *layers)
    if "mamba_n_heads" in config or "mamba_num_heads" in config:
        return _selective(config, *layers)
    return StateSizes(*layers, 3 * hidden, hidden, False, 0, _filled(hidden))


def traffic_of(config: Mapping[str, Any]) -> StateTraffic:
    """Return the memory traffic of states in a pass over rows of one session."""
    sizes = state_sizes(config)
    return STATELESS if sizes is None else sizes.traffic


def _selective(config: Mapping[str, Any], layers: int, attending: int) -> StateSizes:
    if "mamba_n_heads" in config:
        heads, key_dim = int(config["mamba_n_heads"]), int(config["mamba_d_state"])
        expanded = int(config.get("mamba_expand", 2)) * int(config["hidden_size"])
        values = int(config.get("mamba_d_ssm") or expanded)
        groups = int(config["mamba_n_groups"])
    else:
        heads, key_dim = int(config["mamba_num_heads"]), int(config["ssm_state_size"])
        values = heads * int(config["mamba_head_dim"])
        groups = int(config.get("n_groups") or config["mamba_n_groups"])
    keys = groups * key_dim
    of_state = _of_state(keys, key_dim, heads, values // heads)
    return StateSizes(layers, attending, 2 * values + 2 * keys + heads, values, False, *of_state)


def _by_channel(config: Mapping[str, Any], layers: int, attending: int) -> StateSizes:
    own = config.get("linear_attn_config") or {}
    heads = int(config.get("linear_num_heads") or own["num_heads"])
    width = int(config.get("linear_head_dim") or own["head_dim"])
    values = heads * width
    state, row = _of_state(values, width, heads, width)
    row += _filled(values) - _filled(heads)
    # the size of the second matrices is counted with the first one
    low = 2 * width + -(-2 * width * values // int(config["hidden_size"]))
    return StateSizes(layers, attending, 3 * values + heads + low, values, False, state, row)


def _of_state(keys: int, key_dim: int, heads: int, value_dim: int) -> tuple[int, int]:
    columns = heads * _filled(value_dim)
    channels = _filled(2 * keys + heads * value_dim)
    return columns * key_dim, channels + _filled(keys) + columns + _filled(heads)


def _filled(numbers: int) -> int:
    return -(-numbers // COLUMNS) * COLUMNS


WEIGHT_BYTES = {"fp32": 4, "half": 2, "fp16": 2, "bf16": 2, "int8": 1}
INT4 = "int4"  # weights that become blocks of 4 bits, with more at both ends
CACHE_BYTES = {"fp32": 4, "half": 2, "q8": 1}  # bytes of keys and values, without scales
TREE_ROWS = 289  # rows of a pass that may have logits: 288 nodes of a tree, and the root
MOST = 1 << 24  # an upper bound of numbers in a config.json, far above all known models


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts, including 4 bytes per output for a possible bias."""

    layers: int
    layer: int  # one decoder layer's matrices and norms
    matrix: int  # the largest matrix of a layer: a device needs a second copy while it is laid out
    head: int  # the final norm and the language model's head
    embedding: int
    row: int  # keys and values of a token in one layer, on average if some layers have states
    context: int
    state: int  # the state of one row between two layers
    inner: int  # a row within a layer: normed states, queries, keys, values, attention, MLP units
    groups: int  # query heads of a key head: a GPU has what a row sees once for each
    logits: int  # bytes of one row
    widened: int = 0  # keys and values of a token in one layer, widened as a GPU computes with them
    states: int = 0  # the states of a session and of a tree behind it in one layer
    factors: int = 0  # the factors by which one row changes a state, in one layer
    experts: int = 0  # the bytes of a layer's routed experts and their router
    apart: int = 0  # the bytes of a layer on a device that stay with the CPU
    unrounded: int = 0  # additional bytes of a layer's unquantised matrices
    wider: int = 0  # bytes of the largest of the last layers above the mean
    lent: int = 0  # keys and values of a token in layers that others read, which a device mirrors
    inputs: int = 0  # the inputs that all layers have of their own for one row
    tied: int = 0  # the part of the embedding that is in the CPU's head
    loading: int = 0  # most bytes beyond the weights while loading; 0: the tensors are unknown


Shapes = Sequence[tuple[int, int]]  # [out, in] of matrices


@dataclass(frozen=True)
class Matrices:
    """A model's matrices, for experts and layers that differ."""

    linears: Shapes  # the head's included
    experts: Shapes = ()  # both matrices of every expert of every layer
    tensors: Sequence[Any] = ()  # the tensors of the matrices in a file


def mixed(sizes: Sizes, weights: str, matrices: Matrices) -> Sizes:
    """Return sizes by matrices for models with experts or own inputs, else `sizes`."""
    return weighed(sizes, weights, matrices) if matrices.experts or sizes.inputs else sizes


def weighed(sizes: Sizes, weights: str, matrices: Matrices) -> Sizes:
    """Return the sizes of a model from its matrices, for an average layer."""
    head, hidden = sizes.logits // NUMBER_BYTES, sizes.state // NUMBER_BYTES
    linears = Counter(matrices.linears)
    linears[head, hidden] -= 1
    routers = len(matrices.experts) // 2 * hidden * NUMBER_BYTES
    plain, experts = (
        sum(count * matrix_bytes(weights, n, k) for (n, k), count in counted.items())
        for counted in (linears, Counter(matrices.experts))
    )
    largest = max(matrix_bytes(weights, n, k) for n, k in (*+linears, *matrices.experts))
    norms = 4 * hidden * NUMBER_BYTES
    mean = -(-(experts + routers) // sizes.layers)
    layer = -(-plain // sizes.layers) + mean + norms + sizes.unrounded
    return replace(sizes, layer=layer, matrix=largest, experts=mean)


def with_host_experts(sizes: Sizes) -> Sizes:
    """Return the sizes of a model if the CPU computes the experts of layers on a device."""
    return replace(sizes, apart=sizes.experts)


def in_a_file(sizes: Sizes, file_bytes: int, *, tied: bool) -> Sizes:
    """Return the sizes of a model in a file of `file_bytes`; `sizes`: in 16 bits; `tied`: its head
    is its embedding."""
    whole = sizes.layers * sizes.layer + (1 if tied else 2) * sizes.head
    share = file_bytes / whole
    return replace(
        sizes,
        layer=round(share * sizes.layer),
        matrix=round(share * sizes.matrix),
        head=round(share * sizes.head),
        embedding=0 if tied else round(share * sizes.head),
        tied=0,
        experts=round(share * sizes.experts),
    )


def _usual(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json with the usual name of the context length, which Kimi Linear's lacks."""
    length = config.get("model_max_length")
    return config if length is None else {"max_position_embeddings": length, **config}


def has_sizes(config: Mapping[str, Any]) -> bool:
    """True if a config.json has the numbers that `sizes_of` needs."""
    config = _usual(config)
    gpt2 = _has_names_of_gpt2(config)
    needed = [config.get(name) for name in (*(GPT2.values() if gpt2 else GPT2), "vocab_size")]
    if not gpt2:
        needed = [
            *(config.get(name) for name in (*GPT2, "vocab_size") if name != "num_hidden_layers"),
            *(count_layers(config), _units(config)),
        ]
    optional = [
        config.get(name) for name in (("n_inner",) if gpt2 else ("num_key_value_heads", "head_dim"))
    ]
    if _has_latents(config):
        needed += [config.get(name) for name in LATENT]
        optional += [config.get(name) for name in ("q_lora_rank", "v_head_dim")]
    if not all(map(_is_size, needed)) or not all(
        value is None or _is_size(value) for value in optional
    ):
        return False
    try:
        state_sizes(config)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return False
    heads = config[GPT2["num_attention_heads"] if gpt2 else "num_attention_heads"]
    hidden = config[GPT2["hidden_size"] if gpt2 else "hidden_size"]
    fits = hidden >= heads if gpt2 or not config.get("head_dim") else True
    return bool(fits and heads % (1 if gpt2 else config.get("num_key_value_heads") or heads) == 0)


def _units(config: Mapping[str, Any]) -> Any:
    """The units of an MLP, or of an expert if layers have no MLP next to their experts."""
    names = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size")
    parts = config, config.get("ffn_config")
    every = (part.get(name) for part in parts if isinstance(part, Mapping) for name in names)
    found = next(filter(None, every), None)
    if isinstance(found, list | tuple):  # one for each layer
        return max(filter(_is_size, found), default=None)
    return found


def _has_names_of_gpt2(config: Mapping[str, Any]) -> bool:
    return "n_embd" in config and "hidden_size" not in config


def _has_latents(config: Mapping[str, Any]) -> bool:
    return config.get("kv_lora_rank") is not None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST


def sizes_of(config: Mapping[str, Any], weights: str, cache: str = "fp32") -> Sizes:
    """Return the sizes by a config.json, with these weights and keys and values of the type
    `cache`; the embedding has 2 or 4 bytes a number as stored."""
    config, gpt2 = _usual(config), _has_names_of_gpt2(config)

    def number(name: str) -> int:
        return int(config[GPT2.get(name, name) if gpt2 else name])

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = int((not gpt2 and config.get("num_key_value_heads")) or heads)
    if config.get("model_type") == "gpt_bigcode" and config.get("multi_query", True):
        kv_heads = 1
    gated = not gpt2 and config.get("model_type") not in UNGATED
    head_dim = int(config.get("head_dim") or hidden // heads)
    units = int((config.get("n_inner") or 4 * hidden) if gpt2 else _units(config))
    vocabulary = int(config["vocab_size"])
    stored = 2 if str(config.get("dtype") or config.get("torch_dtype")).endswith("16") else 4
    mixer = (
        _latents(config, weights, stored)
        if _has_latents(config)
        else _heads(config, weights, heads, kv_heads, head_dim)
    )
    matrices = [*mixer.matrices]
    matrices += [
        matrix_bytes(weights, n, k) for n, k in (((1 + gated) * units, hidden), (hidden, units))
    ]
    layers = number("num_hidden_layers") if gpt2 else int(count_layers(config))
    stateless = StateSizes(0, layers, 0, 0, False, 0, 0)
    states = (None if gpt2 else state_sizes(config)) or stateless

    def average(attended: int, recurrent: int) -> int:
        """Return the mean over all layers, of those with attention and those with a state."""
        return -(-(states.attending * attended + states.layers * recurrent) // layers)

    given, taken = (states.given, hidden), (hidden, states.taken)
    mixers = [matrix_bytes(weights, n, k) for n, k in (given, taken)]
    gates = states.gated * matrix_bytes(weights, heads * head_dim, hidden)
    matrices[1] += gates
    shared = SharedLayers.of(config, layers, kv_heads, head_dim)
    wide = shared.widened * sum(matrices[-2:])
    wide_mean = -(-shared.layers * wide // layers)
    wider = shared.wider and matrix_bytes(weights, 2 * heads * shared.wider, hidden)
    table = _table_bytes(weights, vocabulary, hidden, stored)
    streams = int(config.get("altup_num_inputs") or 0)
    own_width = int(config.get("hidden_size_per_layer_input") or 0)
    own = 3 * matrix_bytes(weights, own_width, hidden) if own_width else 0
    return Sizes(
        layers=layers,
        layer=average(sum(matrices[:-2]), sum(mixers))
        + sum(matrices[-2:])
        + wide_mean
        + own
        + 4 * hidden * NUMBER_BYTES,
        matrix=(1 + shared.widened) * max(matrices),
        head=matrix_bytes(weights, vocabulary, hidden, end=True) + 2 * hidden * NUMBER_BYTES,
        embedding=table + _own_inputs_bytes(config, weights, stored),
        tied=table if config.get("tie_word_embeddings") and weights != "int8" else 0,
        row=average(cached_bytes(mixer.cached, cache, mixer.width), states.token_bytes),
        context=int(
            config.get(LONGEST) or scaled_positions(config, number("max_position_embeddings"))
        ),
        state=hidden * NUMBER_BYTES,
        inner=(
            (3 + streams) * hidden
            + mixer.inner
            + (3 if gated else 2) * (1 + shared.widened) * units
        )
        * NUMBER_BYTES,
        groups=heads // kv_heads,
        logits=vocabulary * NUMBER_BYTES,
        widened=0 if cache == "fp32" else mixer.cached * NUMBER_BYTES,
        states=average(0, states.session_bytes(TREE_ROWS)),
        factors=average(0, NUMBER_BYTES * states.row),
        unrounded=mixer.unrounded,
        wider=wide - wide_mean + wider,
        lent=cached_bytes(2 * shared.lent, cache, mixer.width),
        inputs=layers * own_width * NUMBER_BYTES,
    )


def cached_bytes(numbers: int, cache: str, width: int) -> int:
    """Return the bytes that `numbers` numbers of keys and values take in heads of this width: in q8
    each block of 32 numbers of a head has a 2-byte scale."""
    scales = -(-numbers // width) * -(-width // 32) if cache == "q8" else 0
    return numbers * CACHE_BYTES[cache] + 2 * scales


@dataclass(frozen=True)
class _Mixer:
    matrices: Sequence[int]  # bytes of each
    cached: int  # numbers of a row in a cache
    width: int  # numbers of one of its heads
    inner: int  # numbers that a row takes within it
    unrounded: int = 0


def _heads(
    config: Mapping[str, Any], weights: str, heads: int, kv_heads: int, head_dim: int
) -> _Mixer:
    hidden = int(config["n_embd" if _has_names_of_gpt2(config) else "hidden_size"])
    rows = (heads + 2 * kv_heads) * head_dim
    matrices = [
        matrix_bytes(weights, n, k) for n, k in ((rows, hidden), (hidden, heads * head_dim))
    ]
    cached = 2 * _cached(config, kv_heads, head_dim)
    return _Mixer(matrices, cached, head_dim, 2 * rows + heads * head_dim)


def _latents(config: Mapping[str, Any], weights: str, stored: int) -> _Mixer:
    """Attention over latents; its key and value matrices are as stored if others are int8 or
    int4."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rank, plain, rotated = (int(config[name]) for name in LATENT)
    value_dim = int(config.get("v_head_dim") or hidden // heads)
    queries, low, width = heads * (plain + rotated), config.get("q_lora_rank"), rank + rotated
    first = queries if low is None else int(low)
    shapes = [(first + width, hidden), (hidden, heads * value_dim)]
    shapes += [] if low is None else [(queries, first)]
    exact = weights if weights not in ("int8", INT4) else "half" if stored == 2 else "fp32"
    up = matrix_bytes(exact, heads * (plain + value_dim), rank)
    return _Mixer(
        [*(matrix_bytes(weights, n, k) for n, k in shapes), up],
        width,
        width,
        first + width + 2 * queries + heads * (width + rank + value_dim),
        up - matrix_bytes(weights, heads * (plain + value_dim), rank),
    )


def _cached(config: Mapping[str, Any], kv_heads: int, head_dim: int) -> int:
    """Return the mean numbers of a token's keys in layers with attention, without shared ones."""
    special, shared = config.get("per_layer_config"), config.get("num_kv_shared_layers") or 0
    if not isinstance(special, Mapping) and not shared:
        return kv_heads * head_dim
    keys = keys_of_layers(config, kv_heads, head_dim)
    return -(-sum(keys[: len(keys) - int(shared)]) // len(keys))


def _own_inputs_bytes(config: Mapping[str, Any], weights: str, stored: int) -> int:
    """Return the bytes of the table of the layers' separate inputs."""
    width = config.get("hidden_size_per_layer_input") or 0
    rows = config.get("vocab_size_per_layer_input") or config["vocab_size"]
    whole = int(config["num_hidden_layers"]) * int(width) if width else 0
    return _table_bytes(weights, int(rows), whole, stored) if whole else 0


def _table_bytes(weights: str, rows: int, width: int, stored: int) -> int:
    """Return the bytes of a table of tokens, with `stored` bytes per number except for int4."""
    kind = int4_kind(width, end=True) if weights == INT4 else None
    return rows * width * stored if kind is None else KINDS[kind].size_of((rows, width))


def matrix_bytes(weights: str, outputs: int, inputs: int, *, end: bool = False) -> int:
    """Return the bytes of a packed matrix with a bias, in whole cache lines. `end`: the head's."""
    columns = -(-outputs // VECTOR) * VECTOR
    kind = int4_kind(inputs, end=end) if weights == INT4 else None
    if kind is not None:
        packed = KINDS[kind].packed_size_of((columns, inputs))
    else:
        packed = columns * inputs * WEIGHT_BYTES["fp32" if weights == INT4 else weights]
    if weights == "int8":
        packed = (
            columns * -(-inputs // STEP) * STEP + columns * NUMBER_BYTES + outputs * NUMBER_BYTES
        )
    return -(-(packed + outputs * NUMBER_BYTES) // ALIGNMENT) * ALIGNMENT


GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
"""The sizes of attention over latents, by their names in a config.json."""

UNGATED = frozenset(
    {
        *("apertus", "arcee", "gpt_neox", "jais2"),
        *("nemotron", "nemotron_h", "opt", "phi", "starcoder2"),
    }
)
"""Model types, of those with names like Llama's, whose MLP has no gate."""

ALIGNMENT, VECTOR, STEP = 64, 16, 4  # of `kernels/native/packing.h`: alignment, outputs of a panel


@dataclass(frozen=True)
class SharedLayers:
    """The last layers of a model, which read keys and values of others."""

    layers: int
    widened: int  # 1 if their MLPs are twice as wide as those of the others, else 0
    lent: int  # numbers of a token's keys in those that they read: the last one of each kind
    wider: int  # numbers of the widest head above the mean over all layers

    @classmethod
    def of(
        cls, config: Mapping[str, Any], layers: int, kv_heads: int, head_dim: int
    ) -> "SharedLayers":
        """Return them from a config.json."""
        count, kinds = int(config.get("num_kv_shared_layers") or 0), config.get("layer_types")
        if not count or not isinstance(kinds, list | tuple):
            return cls(0, 0, 0, 0)
        keys = keys_of_layers(config, kv_heads, head_dim)
        last = dict(zip(kinds[: layers - count], keys, strict=False))
        lent = sum(last.get(kind, 0) for kind in {*kinds[layers - count :]})
        wider = max(keys[layers - count :]) - sum(keys) // layers
        wide = int(bool(config.get("use_double_wide_mlp")))
        return cls(count, wide, lent, max(0, wider) // kv_heads)


def keys_of_layers(config: Mapping[str, Any], kv_heads: int, head_dim: int) -> list[int]:
    """Return the numbers of a token's keys in each layer, if it had its own."""
    special = config.get("per_layer_config")
    others = {str(i): own for i, own in special.items()} if isinstance(special, Mapping) else {}
    layers = (others.get(str(index), {}) for index in range(int(config["num_hidden_layers"])))
    return [
        int(own.get("num_key_value_heads", kv_heads)) * int(own.get("head_dim", head_dim))
        for own in layers
    ]
