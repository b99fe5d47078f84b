"""Numbers that change say so: the golden run against what is written down, and this processor's formats against both."""

import copy

import golden
import pytest

from quicksilver import numerics
from quicksilver.runs.choices import choices
from quicksilver.runs.config import compose
from quicksilver.runs.parts import module_entry
from quicksilver.runtime.errors import QuickSilverError

pytestmark = pytest.mark.processor


@pytest.fixture(scope="module")
def written():
    return golden.load()


def test_numbers_are_those_of_the_numerics_version_and_every_module_does_something(written):
    found = dict(golden.run())  # in one test, because two workers would each run it
    _every_module_does_something(found)
    for protocol in golden.MODELS:  # the four mechanisms stand in it together
        case = found[f"{'+'.join(golden.TOGETHER)} {protocol}"]
        assert len(case["modules"]) == 4
        assert {"null", "audit", "batch_flops", "kv_bytes_by_layer", "inside"} <= set(case["numbers"])
    golden.compare(written, found)


def test_number_formats_are_as_far_from_float64_as_they_may(written):
    rounded = dict(golden.run(exact=False))
    apart = golden.rounding(rounded, written["cases"])
    assert {case["format"] for case in rounded.values() if "format" in case} == set(golden.BOUNDS)
    assert {key: far for key, far in apart.items() if not far <= golden.BOUNDS[rounded[key]["format"]]} == {}


def _every_module_does_something(found):
    for name in set(choices("modules")) - set(golden.LEFT_OUT):
        taken = 0
        for protocol in golden.MODELS:
            case = next(case for key, case in found.items() if key.split(" ")[0].split("+")[0] == name and key.endswith(protocol))
            if "refused" in case:
                continue
            taken += 1
            dense = found[f"dense {protocol}"]["numbers"]["windows"]["nll_nats"]
            assert (case["numbers"]["windows"]["nll_nats"] == dense) == (name in golden.IDLE), (name, protocol)
        assert taken


def test_modules_are_read_as_hydra_composes_them():
    for name in ("halting_paper_b2", "token_fusion_attention", "sliding_window"):
        key, entry = module_entry(name)
        assert compose([f"modules=[{name}]"]).modules == {key: entry}


def test_what_changed_decides_what_is_to_be_done(monkeypatch, written):
    changed = copy.deepcopy(written["cases"])
    changed["halting_paper_b2 all"]["numbers"]["active_tokens"][3] -= 1
    says = r"1 of \d+ golden cases.*halting_paper_b2 all: numbers\.active_tokens\[3\].*raise VERSION in quicksilver/numerics\.py.*--write"
    with pytest.raises(QuickSilverError, match=says):
        golden.compare(written, changed)
    changed = copy.deepcopy(written["cases"])
    changed["one more all"] = changed["halting all"]
    with pytest.raises(QuickSilverError, match=r"one more all.*No version is to be raised"):
        golden.compare(written, changed)
    changed = copy.deepcopy(written["cases"])
    changed["halting all"]["modules"]["halting"]["tau_drift"] = 0.5
    golden.compare(written, changed)  # an option that changes no number, as when it is renamed
    changed["halting all"]["numbers"]["active_tokens"][0] -= 1
    with pytest.raises(QuickSilverError, match=r"\(halting all\).*No version is to be raised"):
        golden.compare(written, changed)
    monkeypatch.setattr(numerics, "VERSION", numerics.VERSION + 1)
    with pytest.raises(QuickSilverError, match=r"write it anew with `python tests/golden\.py --write`"):
        golden.compare(written, {})


def test_sums_may_differ_in_the_last_digits_and_counts_not_at_all():
    expected = {"nll_nats": [100.0], "executed_flops": [10**9], "decisions": "ab"}
    assert golden.differences(expected, {**expected, "nll_nats": [100.0 + 5e-8]}) == []
    assert golden.differences(expected, {**expected, "nll_nats": [100.0002]}) == ["nll_nats[0]: 100.0002, not 100.0"]
    others = ({"executed_flops": [10**9 + 1]}, {"nll_nats": [100.0, 1.0]}, {"nll_nats": [float("nan")]}, {"decisions": None})
    assert all(golden.differences(expected, expected | other) != [] for other in others)
