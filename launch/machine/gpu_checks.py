"""The doctor's checks of graphics cards: which build of torch can use them, and what it lacks."""

from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.launch.machine.cards import Card
from dovetail.launch.machine.facts import Check, Facts, Gpu
from dovetail.launch.machine.wheels import (
    LIKE_GFX1030,
    ROCM,
    build_for,
    driver_for,
    fits,
    has_code_for,
    install_command,
)

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
    """Describe what a build of torch is for."""
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
