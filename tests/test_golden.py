"""Numbers that change say so: the golden run against what is written down, and this processor's formats against both."""

import copy

import golden
import pytest
import torch

from quicksilver import numerics
from quicksilver.modules.halting import Halting
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


def test_a_changed_formula_is_found_and_the_message_says_what_to_do(monkeypatch, written):
    keys = ("halting_paper_b2 all", "heavy_hitter all", "static_exit all")
    cases = golden.cases()
    monkeypatch.setattr(golden, "cases", lambda: {key: cases[key] for key in keys})
    known = {"numerics_version": numerics.VERSION, "cases": {key: written["cases"][key] for key in keys}}
    choose = Halting.choose

    def fewer(self, *arguments, **named):
        chosen = choose(self, *arguments, **named)
        return chosen & (torch.arange(chosen.shape[1]) % 2 == 0)

    monkeypatch.setattr(Halting, "choose", fewer)
    says = (
        r"1 of 3 golden cases.*halting_paper_b2 all: numbers\.active_tokens.*raise VERSION in quicksilver/numerics\.py.*--write"
    )
    with pytest.raises(QuickSilverError, match=says):
        golden.compare(known, dict(golden.run()))
    monkeypatch.setattr(numerics, "VERSION", numerics.VERSION + 1)
    with pytest.raises(QuickSilverError, match=r"write it anew with `python tests/golden\.py --write`"):
        golden.compare(known, {})


def test_a_new_module_or_option_asks_for_the_file_and_not_for_a_version(written):
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


def test_sums_may_differ_in_the_last_digits_and_counts_not_at_all():
    expected = {"nll_nats": [100.0], "executed_flops": [10**9], "decisions": "ab"}
    assert golden.differences(expected, {**expected, "nll_nats": [100.0 + 5e-8]}) == []
    assert golden.differences(expected, {**expected, "nll_nats": [100.0002]}) == ["nll_nats[0]: 100.0002, not 100.0"]
    assert golden.differences(expected, {**expected, "executed_flops": [10**9 + 1]}) != []
    assert golden.differences(expected, {**expected, "nll_nats": [100.0, 1.0]}) != []
    assert golden.differences(expected, {**expected, "nll_nats": [float("nan")]}) != []
    assert golden.differences(expected, {"nll_nats": [100.0]}) != []
