"""Checks of this machine: each has a finding and, if needed, a remedy."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dovetail.launch.console.terminal import counted
from dovetail.launch.machine.cards import Card
from dovetail.launch.machine.cores import lay_out
from dovetail.launch.machine.facts import (
    HUGE_PAGES,
    LEAST_FILES,
    LEAST_SHARED,
    SHARED_MEMORY,
    Check,
    Facts,
    Gpu,
)
from dovetail.launch.machine.fit import HUBS, needs_of
from dovetail.launch.machine.others import OTHERS
from dovetail.launch.machine.topology import cpus_for, format_numbers
from dovetail.launch.machine.wheels import (
    LIKE_GFX1030,
    ROCM,
    build_for,
    driver_for,
    fits,
    has_code_for,
    install_command,
)
from dovetail.protocol.settings import Settings

OVERRIDE = (
    "start dovetail with HSA_OVERRIDE_GFX_VERSION=10.3.0, so that it runs the code for gfx1030 "
    "(AMD does not support that)"
)
ACCESS = {
    "AMD": "let this user open /dev/kfd and /dev/dri (groups render and video; in a container "
    "--device /dev/kfd --device /dev/dri), and load the driver amdgpu",
    "Intel": "install Intel's compute runtime (libze-intel-gpu1, or intel-level-zero-gpu) and let "
    "this user open /dev/dri (group render; in a container --device /dev/dri)",
}


def build_of(inventory: Mapping[str, Any]) -> str:
    """Return what a build of torch is for, in words."""
    named = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel's XPU"}
    return next(
        (f"for {name} {inventory[key]}" for key, name in named.items() if inventory[key]),
        "for CPUs",
    )


def examine_gpus(facts: Facts) -> Iterator[Check]:
    if facts.driver_problem:
        yield Check(
            "GPU driver",
            False,
            facts.driver_problem,
            "reinstall the NVIDIA driver, or restart after an update of it; in a container pass "
            "the GPU on (--gpus all)",
        )
    for index, gpu in enumerate(facts.gpus):
        yield from _gpu(facts, index, gpu)
    for index, products in enumerate(facts.inventory.get("products", ())):
        yield _products(index, products)
    for index, card in enumerate(facts.cards):
        yield _card(facts, f"{card.maker} card {index}", card)
    yield from _unproved(facts)
    if not (facts.gpus or facts.cards or facts.driver_problem or facts.inventory.get("found")):
        yield Check("GPU", True, "none: target and draft share the CPU")


def _unproved(facts: Facts) -> Iterator[Check]:
    for device in facts.inventory.get("found", ()):
        if device["unproved"]:
            said = f"torch finds {device['chip']}; {device['unproved']}"
            yield Check(device["name"], True, f"{said}, and checks its results at each start")


def _card(facts: Facts, name: str, card: Card) -> Check:
    memory = f", {card.memory_bytes >> 20} MiB" if card.memory_bytes else ""
    target = f" ({card.target})" if card.target else ""
    found = f"{card.name}{target}{memory}, driver {card.driver or 'none'}"
    if "broken" in facts.inventory:
        return Check(name, True, found)
    release, used = str(facts.inventory["torch"]), facts.inventory["found"]
    own = "hip" if card.maker == "AMD" else "xpu"
    if not facts.inventory[own]:
        if card.integrated or facts.gpus:
            said = "a part of the processor" if card.integrated else "there is an NVIDIA GPU, too"
            alone = f"this build of torch, {build_of(facts.inventory)}, does not use it"
            return Check(name, True, f"{found}; {said}: {alone}")
        said = f"{found}; this build of torch is {build_of(facts.inventory)} and cannot use it"
        return Check(name, False, said, _install(card, release))
    if not used:
        return Check(name, False, f"{found}; torch {release} does not find it", ACCESS[card.maker])
    have = facts.inventory["architectures"]
    if card.target and card.target not in have:
        remedy = (
            f"{OVERRIDE}, or use device cpu" if card.target in LIKE_GFX1030 else "use device cpu"
        )
        said = f"torch {release} has no code for {card.target}, only for {' '.join(have)}"
        return Check(name, False, f"{found}; {said}", remedy)
    return Check(name, True, f"{found}; torch {release} finds it")


def _install(card: Card, release: str) -> str:
    if card.maker == "Intel":
        return install_command("xpu", release=release)
    of = next(build for build in ROCM if fits(build, release))
    like = f"; then {OVERRIDE}" if card.target in LIKE_GFX1030 else ""
    return f"{install_command(of, release=release)}{like}"


def _products(index: int, products: Mapping[str, Any]) -> Check:
    name = f"GPU {index}'s products"
    if missing := products["missing"]:
        lost = "torch's products alone are used, which widen 16-bit weights in memory"
        return Check(name, False, f"{missing}; {lost}", "mend it for speed; all works without")
    return Check(name, True, "; ".join(products["said"]))


def _gpu(facts: Facts, index: int, gpu: Gpu) -> Iterator[Check]:
    release, cuda = str(facts.inventory.get("torch", "")), str(facts.inventory.get("cuda", ""))
    name, found = (
        f"GPU {index}",
        f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
        f"{gpu.memory_mib} MiB, driver {gpu.driver or 'unknown'}",
    )
    build = (
        build_for(gpu.capability, release=release, driver=gpu.driver)
        if facts.machine == "x86_64"
        else ""
    )
    remedy = (
        install_command(build, release=release)
        if build
        else "no build of torch that dovetail runs with has code for this card: use device cpu"
    )
    least = driver_for(cuda)
    if "broken" in facts.inventory:
        yield Check(name, True, found)
    elif not cuda:
        yield Check(
            name, False, f"{found}; this build of torch is for CPUs and cannot use it", remedy
        )
    elif not has_code_for(facts.inventory["architectures"], gpu.capability):
        have = " ".join(facts.inventory["architectures"])
        yield Check(
            name, False, f"{found}; torch {release} has no code for it, only for {have}", remedy
        )
    elif least is not None and gpu.driver is not None and gpu.driver < least:
        newer = f"update the driver to {least} or newer" + (
            f", or take another build: {remedy}" if build else ""
        )
        yield Check(name, False, f"{found}; torch {release} needs driver {least} or newer", newer)
    else:
        yield Check(name, True, f"{found}; torch has code for it")


INSTRUCTIONS = (
    *("sse4_1", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni"),
    *("avx512_bf16", "amx_tile", "asimd", "asimddp", "i8mm", "bf16"),
)
"""Flags of /proc/cpuinfo that matter here, on x86-64 and aarch64."""
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""They bind the main thread to a core when torch is imported; later threads inherit that."""
CAPS = (
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "FBGEMM_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
)
SPINNING = {"OMP_WAIT_POLICY": "active", "KMP_BLOCKTIME": "infinite"}
LOST = (
    "int8, int4 and file weights, half weights of BF16 checkpoints, keys and values in 16 bits, "
    "targets on a GPU, a third of the speed, and that a token has the same bytes in every pass and "
    "on every processor"
)


def examine(facts: Facts) -> Iterator[Check]:
    for check in CHECKS:
        yield from check(facts)


def _processor(facts: Facts) -> Iterator[Check]:
    found = " ".join(name for name in INSTRUCTIONS if name in facts.flags) or "none that matter"
    yield Check("processor", True, f"{facts.machine}: {found}")


def _kernels(facts: Facts) -> Iterator[Check]:
    if "broken" in facts.inventory:
        return
    missing, failures = facts.inventory["kernels_missing"], facts.inventory["kernels_failures"]
    if missing:
        install = "" if facts.compiler else "install a C++ compiler (apt-get install g++), then "
        remedy = (
            f"{install}build them: {sys.executable} -m dovetail.workers.kernels.build, or "
            "reinstall dovetail"
        )
        yield Check("kernels", False, f"{missing.partition(';')[0]}; lost: {LOST}", remedy)
        return
    used, slow = facts.inventory["kernels"], ":" in facts.inventory["kernels"]
    found = f"{used}; this machine can use {', '.join(facts.inventory['isas'])}"
    remedy = "use a newer machine; a virtual machine needs the host's processor (qemu: -cpu host)"
    yield Check("kernels", not slow, found, remedy if slow else "")
    advice = (
        f"set target.backend = library, which loses {LOST}; rebuild the kernels ({sys.executable} "
        "-m dovetail.workers.kernels.build) with another compiler"
    )
    found = (
        "; ".join(failures)
        or "products are right, with the same bytes, for every kind of weights and instruction set"
    )
    yield Check("kernels' self-test", not failures, found, advice if failures else "")


def _torch(facts: Facts) -> Iterator[Check]:
    if "broken" in facts.inventory:
        yield Check(
            "torch",
            False,
            f"cannot be imported: {facts.inventory['broken']}",
            "reinstall it: pip install --force-reinstall 'torch>=2.8,<2.14'",
        )
        return
    yield Check(
        "torch",
        True,
        f"{facts.inventory['torch']}, {build_of(facts.inventory)}, uses "
        f"{facts.inventory['cpu_capability']}",
    )


def _cores(facts: Facts) -> Iterator[Check]:
    topology, usable = facts.topology, len(facts.topology.threads)
    layout = lay_out(topology)
    physical = sum(len(node.cores) for node in topology.nodes)
    found = (
        f"{physical} physical, {usable} of "
        f"{counted(facts.online_cores, 'hardware thread')} usable "
        f"({format_numbers(topology.threads)})"
    )
    places = (
        f"target on {format_numbers(layout.target.cores)}, draft on "
        f"{format_numbers(layout.draft.cores)}"
    )
    if layout.shared:
        places += ", which they share"
    alone = layout.shared == layout.target.cores
    advice = "give this process a second core: draft and target share one" if alone else ""
    yield Check("cores", not alone, f"{found}; {places}", advice)
    if topology.quota is not None:
        whole = topology.quota >= 1 and topology.quota == int(topology.quota)
        given = (
            f"{topology.quota:g} CPUs' worth of time, laid out as "
            f"{counted(cpus_for(topology.quota), 'core')}"
        )
        yield Check(
            "CPU quota",
            whole,
            given,
            ""
            if whole
            else "a quota that is not a whole number stops all threads for a part of each period: "
            "make it whole, or use a cpuset",
        )


def _memory_nodes(facts: Facts) -> Iterator[Check]:
    nodes = facts.topology.nodes
    said = "; ".join(
        f"node {n.number}: {counted(sum(map(len, n.cores)), 'thread')}, "
        f"{n.memory_bytes / 2**30:.1f} GiB"
        for n in nodes
    )
    if len(nodes) < 2:
        yield Check("memory nodes", True, f"{said}; one node: only cores are bound")
    elif facts.memory_refusal:
        remedy = (
            "let this container bind memory (--cap-add SYS_NICE), or start it bound from "
            "outside (--cpuset-cpus and --cpuset-mems, or numactl)"
        )
        yield Check(
            "memory nodes",
            False,
            f"{said}; memory cannot be bound ({facts.memory_refusal}): cores only",
            remedy,
        )
    else:
        place = lay_out(facts.topology).target
        several = sum(node.memory_bytes > 0 for node in facts.topology.computing) > 1
        yield Check(
            "memory nodes",
            True,
            f"{said}; memory can be bound; the target uses node {format_numbers(place.nodes)}"
            + (", or all nodes with cores by --target.numa shard" if several else ""),
        )


def _huge_pages(facts: Facts) -> Iterator[Check]:
    fine = facts.huge_pages in ("always", "madvise")
    advice = (
        ""
        if fine
        else f"echo madvise | sudo tee {HUGE_PAGES}: a pass reads all weights, and with small "
        "pages every 4 KB need a TLB entry"
    )
    yield Check(
        "huge pages",
        fine,
        f"transparent huge pages: {facts.huge_pages or 'not in this kernel'}",
        advice,
    )


def _others(facts: Facts) -> Iterator[Check]:
    if (load := facts.others) is not None:
        busy = "; measurements are valid only under the same load"
        yield Check("other programs", True, load.words + (busy if load.share > OTHERS else ""))


def _memory(facts: Facts) -> Iterator[Check]:
    least = sum(need.size for need in needs_of(Settings(), (*HUBS, "target", "draft")))
    fine = facts.memory_bytes >= least
    found = (
        f"{facts.memory_bytes / 2**30:.1f} GiB for this process by machine and control "
        f"group, {facts.free_bytes / 2**30:.1f} GiB free"
    )
    yield Check(
        "memory",
        fine,
        found,
        ""
        if fine
        else f"a service of the embedded models takes {least / 2**30:.1f} GiB: raise the limit",
    )


def _limits(facts: Facts) -> Iterator[Check]:
    fine = facts.files >= LEAST_FILES
    yield Check(
        "open files",
        fine,
        str(facts.files),
        ""
        if fine
        else f"ulimit -n {4 * LEAST_FILES} (LimitNOFILE= in a unit): a coordinator takes one "
        "for each client",
    )
    fine = facts.shared_bytes >= LEAST_SHARED
    found = (
        f"{facts.shared_bytes / 2**20:.0f} MiB free in {SHARED_MEMORY}"
        if facts.shared_bytes
        else f"{SHARED_MEMORY} cannot be used"
    )
    yield Check(
        "shared memory",
        fine,
        found,
        "" if fine else "torch may ask for it: --shm-size=1g for a container",
    )


def _environment(facts: Facts) -> Iterator[Check]:
    there = facts.environment
    disturbing = [name for name in (*PINNING, *CAPS) if there.get(name)]
    disturbing += [name for name, value in SPINNING.items() if there.get(name, "").lower() == value]
    preloaded = [
        name for name in there.get("LD_PRELOAD", "").split(":") if "iomp" in name or "mkl" in name
    ]
    values = {
        **{name: there[name] for name in disturbing},
        **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
    }
    found, names = ", ".join(f"{name}={value}" for name, value in values.items()), " ".join(values)
    advice = (
        f"unset {names}: dovetail binds and counts threads itself, and what caps instructions "
        "or makes threads spin slows it down"
        if names
        else ""
    )
    yield Check(
        "environment",
        not names,
        found or "no variable that binds, caps or spins torch's threads",
        advice,
    )


def _profile(facts: Facts) -> Iterator[Check]:
    advice = (
        facts.profile_problem
        and "measurements are not saved: make that folder writable, or set XDG_CACHE_HOME to "
        "one that is; remove a damaged file"
    )
    yield Check(
        "profile file", not facts.profile_problem, facts.profile_problem or facts.profile, advice
    )


def _caches(facts: Facts) -> Iterator[Check]:
    sizes = sorted(facts.caches.items(), key=lambda one: (-one[1], one[0]))
    parts = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes)
    kept = f"{facts.cache}: {parts}; any of it may be removed and is rebuilt when needed"
    yield Check("caches", True, kept if sizes else f"{facts.cache}: empty")


CHECKS: Sequence[Callable[[Facts], Iterable[Check]]] = (
    *(_processor, _kernels, _torch, examine_gpus, _cores, _memory_nodes, _huge_pages, _others),
    *(_memory, _limits, _environment, _profile, _caches),
)
