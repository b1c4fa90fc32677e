"""Measurements are found again, whoever else writes, and a damaged file is told in one line."""

import json
import multiprocessing
import random
from pathlib import Path

import pytest
from pydantic import ValidationError

from dovetail.protocol.calibration import (
    Calibration,
    ContextCurve,
    DeviceCosts,
    ExpertCosts,
    LeastTime,
    MachineLimits,
    ReadingCosts,
    RowsSeconds,
)
from dovetail.protocol.experts import DENSE, Mixture, Routing, count_experts
from dovetail.protocol.profile import (
    Entry,
    LinearChoice,
    Profile,
    ProfileError,
    ProfileKey,
    load_profile,
    machine_key,
    shapes_key,
    update_profile,
)


@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (64, 8), (128, 8)])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_pass_reads_the_experts_that_its_rows_draw(count: int, chosen: int, rows: int) -> None:
    draws, mixture = random.Random(rows), Mixture(count, chosen, share=0.9)
    drawn = [
        len({expert for _ in range(rows) for expert in draws.sample(range(count), chosen)})
        for _ in range(400)
    ]
    read = 0.1 + 0.9 * sum(drawn) / len(drawn) / count
    assert mixture.read(rows) == pytest.approx(read, rel=0.03)


def test_a_model_without_experts_is_read_whole() -> None:
    assert DENSE.active == DENSE.read(64) == 1.0


def test_with_experts_a_tree_is_bound_by_memory_for_longer() -> None:
    limits = {"size": 30e9, "operations": 60e9, "bandwidth_gb_s": 50.0, "gflop_s": 1000.0}
    dense, sparse = (LeastTime.of(**limits, mixture=one) for one in (DENSE, Mixture(128, 8, 0.95)))
    assert dense.crossover == pytest.approx(10.0)
    assert sparse.at(1) == pytest.approx(dense.at(1) * (1 - 0.95 * 120 / 128))
    assert sparse.crossover > 5 * dense.crossover
    rows = sparse.crossover
    assert sparse.reading_s(rows) == pytest.approx(rows * sparse.row_s, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({}, (1, 1)),
        ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ({"num_experts": [16, 64], "moe_topk": [1, 8]}, (64, 8)),
        ({"n_routed_experts": None, "num_experts": True}, (1, 1)),
        ({"num_experts": 4, "num_experts_per_tok": 9}, (4, 4)),
    ],
)
def test_experts_are_counted_by_the_names_that_configurations_have(
    config: dict[str, object], counts: tuple[int, int]
) -> None:
    assert count_experts(config) == counts


def test_rows_that_choose_independently_go_through_the_experts_of_the_expectation() -> None:
    routing, mixture = Routing(row=3 * 8, most=3 * 64), Mixture(64, 8, share=1.0)
    for rows in (1, 2, 7, 30):
        assert routing.unique(rows) == pytest.approx(3 * 64 * mixture.read(rows))


def test_the_variety_of_a_pass_gives_its_experts_back() -> None:
    routing = Routing(row=48, most=768)
    for rows in (2, 5, 40):
        for unique in (48.0, 61.0, 90.0):
            found = routing.unique(rows, routing.variety(rows, unique))
            assert found == pytest.approx(unique)
        assert routing.variety(rows, routing.unique(rows)) == pytest.approx(1.0)
    everyone = Routing(row=4, most=4)
    assert everyone.unique(9, everyone.variety(9, 4)) == 4.0


def test_a_row_goes_through_no_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="a row uses 9 experts, but the model has 8"):
        Routing(row=9, most=8)


def test_between_measured_passes_rows_are_as_various_as_in_the_nearest() -> None:
    routing = Routing(row=24, most=384)
    passes = tuple((rows, round(routing.unique(rows, 0.6))) for rows in (1, 4, 16))
    costs = ExpertCosts(routing=routing, passes=passes)
    assert costs.measured(4) == round(routing.unique(4, 0.6))
    assert costs.measured(9) == pytest.approx(routing.unique(9, 0.6), rel=0.02)
    with pytest.raises(ValueError, match="do not ascend"):
        ExpertCosts(routing=routing, passes=((4, 80), (1, 24)))


INTEL = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: A CPU @ 2.0 GHz\nflags\t\t: "
    "fpu avx2 fma\ncpu MHz\t\t: 2000.1\n\nprocessor\t: 1\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


def key(shapes: str = "s", threads: int = 2) -> ProfileKey:
    return ProfileKey(machine="m", software="torch", weights="fp32", threads=threads, shapes=shapes)


def choice(chosen: str = "onednn", *, n: int = 8, k: int = 4, rows: int = 4) -> LinearChoice:
    return LinearChoice(
        n=n,
        k=k,
        rows=rows,
        chosen=chosen,
        seconds={"onednn": 1e-5, "mkl": 2e-5},
        refused={"plain": "differs"},
    )


def calibration(backend: str = "kernels", first: float = 1.0) -> Calibration:
    curve = RowsSeconds(rows=(1, 4, 8), seconds=(first, 2.0, 4.0))
    limits = MachineLimits(bandwidth_gb_s=30.0, peak_gflop_s={"fp32": 100.0}, probe="torch")
    by_context = (ContextCurve(context=512, t_v=curve),)
    return Calibration(
        measured="2026-11-20T10:00:00+00:00",
        backend=backend,
        context=512,
        t_v=curve,
        t_v_limit=curve,
        t_v_by_context=by_context,
        layers=22,
        layers_measured=11,
        limits=limits,
    )


def test_a_file_that_says_nothing_of_experts_is_read() -> None:
    told = calibration().model_dump_json()
    assert Calibration.model_validate_json(told.replace('"experts":null,', "")) == calibration()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    entry = update_profile(
        path, key(), lambda entry: entry.with_linears([choice()]).having(calibration())
    )
    assert load_profile(path).find(key()) == entry
    assert entry.linears == (choice(),)
    assert entry.calibrations == (calibration(),)


def test_a_file_that_is_not_there_is_an_empty_profile(tmp_path: Path) -> None:
    assert load_profile(tmp_path / "profile.json") == Profile()
    assert Profile().find(key()) == Entry(key=key())


def test_other_keys_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    update_profile(path, key(threads=1), lambda entry: entry.with_linears([choice("mkl")]))
    update_profile(path, key(threads=2), lambda entry: entry.with_linears([choice("onednn")]))
    assert [
        load_profile(path).find(key(threads=threads)).linears[0].chosen for threads in (1, 2)
    ] == ["mkl", "onednn"]


def test_what_is_measured_anew_takes_the_place_of_the_old() -> None:
    entry = (
        Entry(key=key())
        .with_linears([choice("mkl"), choice("mkl", rows=64)])
        .with_linears([choice("onednn")])
    )
    assert [(c.rows, c.chosen) for c in entry.linears] == [(4, "onednn"), (64, "mkl")]
    entry = (
        entry.having(calibration(first=1.0))
        .having(calibration("library"))
        .having(calibration(first=0.5))
    )
    assert [(c.backend, c.t_v.seconds[0]) for c in entry.calibrations] == [
        ("library", 1.0),
        ("kernels", 0.5),
    ]


def test_the_choice_for_some_rows_is_that_of_the_smallest_class_that_holds_them() -> None:
    entry = Entry(key=key()).with_linears(
        [choice("a", rows=64), choice("b", rows=4), choice("c", rows=4, n=9)]
    )
    assert [
        found and found.chosen for found in (entry.choice(8, 4, rows) for rows in (1, 4, 5, 64, 65))
    ] == ["b", "b", "a", "a", None]


def test_what_a_level_of_a_draft_takes_is_kept_beside_the_rest_and_a_file_without_it_is_read(
    tmp_path: Path,
) -> None:
    path, levels = (
        tmp_path / "profile.json",
        ContextCurve(context=512, t_v=RowsSeconds(rows=(1, 8), seconds=(0.1, 0.2))),
    )
    update_profile(path, key(), lambda entry: entry.having(calibration()).with_levels(levels))
    assert (load_profile(path).find(key()).levels, load_profile(path).find(key()).calibrations) == (
        levels,
        (calibration(),),
    )
    content = json.loads(path.read_text())
    del content["entries"][0]["levels"]
    path.write_text(json.dumps(content))
    assert load_profile(path).find(key()) == Entry(key=key()).having(calibration())


def test_what_prompts_take_is_kept_for_each_device_and_a_file_without_it_is_read(
    tmp_path: Path,
) -> None:
    slow, fast = (
        RowsSeconds(rows=(16, 256), seconds=seconds) for seconds in ((1.0, 9.0), (2.0, 3.0))
    )
    first, second = (
        ReadingCosts(device="cuda:0", local=slow, streamed=fast),
        ReadingCosts(device="cuda:1", local=slow, streamed=slow),
    )
    path = tmp_path / "profile.json"
    update_profile(
        path,
        key(),
        lambda entry: (
            entry.having(first.model_copy(update={"streamed": slow})).having(second).having(first)
        ),
    )
    assert load_profile(path).find(key()).readings == (second, first)
    assert (first.better_from, second.better_from) == (256, None)
    content = json.loads(path.read_text())
    del content["entries"][0]["readings"]
    path.write_text(json.dumps(content))
    assert load_profile(path).find(key()) == Entry(key=key())


def test_what_layers_take_is_kept_for_each_device_and_a_file_without_it_is_read(
    tmp_path: Path,
) -> None:
    path, curve = tmp_path / "profile.json", RowsSeconds(rows=(1, 8), seconds=(0.1, 0.2))

    def costs(device: str, link_gb_s: float) -> DeviceCosts:
        return DeviceCosts(
            device=device,
            link_gb_s=link_gb_s,
            layer=curve,
            streamed=curve,
            head=curve,
            host_layer=curve,
            host_head=curve,
        )

    for one in (costs("cuda:0", 12.0), costs("cpu", 20.0), costs("cuda:0", 24.0)):
        update_profile(path, key(), lambda entry, one=one: entry.having(one))  # type: ignore[misc]
    assert load_profile(path).find(key()).devices == (costs("cpu", 20.0), costs("cuda:0", 24.0))
    content = json.loads(path.read_text())
    del content["entries"][0]["devices"]
    path.write_text(json.dumps(content))
    assert load_profile(path).find(key()).devices == ()


def test_a_curve_is_linear_between_its_points() -> None:
    curve = RowsSeconds(rows=(1, 4, 8), seconds=(1.0, 1.0, 3.0))
    assert [curve.at(rows) for rows in (1, 2, 4, 5, 6, 8, 10)] == [
        1.0,
        1.0,
        1.0,
        1.5,
        2.0,
        3.0,
        4.0,
    ]
    assert RowsSeconds(rows=(2,), seconds=(5.0,)).at(7) == 5.0


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((1, 2), (1.0,)), ((1, 1), (1.0, 2.0)), ((4, 2), (1.0, 2.0)), ((1,), (1e300,))],
)
def test_what_is_no_curve_is_refused(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        RowsSeconds(rows=rows, seconds=seconds)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 2}', '{"entries": 3}', '{"unknown": 1}', "\xff\xfe"]
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ProfileError, match=r"profile\.json.*remove it") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ProfileError):
        update_profile(path, key(), lambda entry: entry)
    assert path.read_bytes() == content.encode("latin-1")


def test_a_place_that_cannot_be_written_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ProfileError, match="XDG_CACHE_HOME"):
        update_profile(tmp_path / "file" / "profile.json", key(), lambda entry: entry)


def write_many(path: Path, process: int) -> None:
    for number in range(10):
        update_profile(
            path, key(f"{process}-{number}"), lambda entry: entry.with_linears([choice()])
        )


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    processes = [
        multiprocessing.get_context("spawn").Process(target=write_many, args=(path, number))
        for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {entry.key.shapes for entry in load_profile(path).entries} == {
        f"{process}-{number}" for process in range(3) for number in range(10)
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["profile.json", "profile.json.lock"]


def test_the_file_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    update_profile(path, key(), lambda entry: entry.having(calibration()))
    content = json.loads(path.read_text())
    assert content["entries"][0]["calibrations"][0]["t_v"] == {
        "rows": [1, 4, 8],
        "seconds": [1.0, 2.0, 4.0],
    }


def test_the_machine_is_told_by_processor_flags_and_cores(tmp_path: Path) -> None:
    def keyed(text: str, cores: int = 8) -> str:
        (tmp_path / "cpuinfo").write_text(text)
        return machine_key(tmp_path / "cpuinfo", cores=cores)

    base = keyed(INTEL)
    assert keyed(INTEL.replace("2000.1", "1999.9")) == base
    assert keyed(INTEL.replace("fpu avx2 fma", "fma fpu avx2")) == base
    others = {
        keyed(INTEL.replace("avx2", "")),
        keyed(INTEL.replace("A CPU", "Another")),
        keyed(INTEL, cores=4),
        keyed(ARM),
        keyed(ARM.replace("asimd", "")),
    }
    assert len(others | {base}) == 6
    assert machine_key() == machine_key()


def test_shapes_are_told_by_how_often_each_occurs() -> None:
    base = shapes_key([(8, 4), (8, 4), (4, 8)])
    assert shapes_key([(4, 8), (8, 4), (8, 4)]) == base
    assert (
        len(
            {
                base,
                shapes_key([(8, 4), (4, 8)]),
                shapes_key([(8, 4), (8, 4), (4, 8)], "head"),
                shapes_key([(84, 4), (8, 4), (4, 8)]),
            }
        )
        == 4
    )
