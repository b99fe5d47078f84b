"""A look inside one text: what it shows is what the model computed and what the modules decided, and nothing is left behind."""

import dataclasses

import pytest
import tiny
import torch
import torch.nn.functional as F
from drawing import all_four
from harness_world import LAYERS, PROMPT, WINDOW
from thinning import first

from quicksilver.measure.inside import look_inside
from quicksilver.measure.signals import token_texts
from quicksilver.modules import AdaptiveQuantization
from quicksilver.records.record import SIGNALS, load_record
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime import architecture_of

IDS = torch.tensor([5, 9, 33, 2, 7, 7, 41, 18, 3, 12])


@pytest.fixture(params=first(["gpt2", "llama", "gpt_neox"], 2))
def model(request):
    return tiny.load(request.param)


def test_dense_signals_are_those_of_the_plain_model(model):
    with torch.no_grad():
        plain = model(IDS[None], output_hidden_states=True, use_cache=False)
    seen = look_inside(model, IDS).arrays
    assert not any(name.startswith("run.") for name in seen)
    states = torch.stack(plain.hidden_states[:-1]).squeeze(1)  # the last one is normed
    torch.testing.assert_close(seen["dense.state_norm"][:-1], states.norm(dim=-1))
    moved = (states[1:] - states[:-1]).norm(dim=-1)
    torch.testing.assert_close(seen["dense.drift_l2"][1:-1], moved)
    torch.testing.assert_close(seen["dense.drift_relative"][1:-1], moved / states[1:].norm(dim=-1))
    log_p = plain.logits[0].log_softmax(-1)
    torch.testing.assert_close(seen["dense.entropy_nats"][-1], -(log_p.exp() * log_p).sum(-1))
    torch.testing.assert_close(seen["dense.nll_nats"][1:], F.cross_entropy(plain.logits[0, :-1], IDS[1:], reduction="none"))
    assert seen["dense.nll_nats"][0].isnan()


def test_the_components_keep_what_they_say_of_the_variance(model):
    seen = look_inside(model, IDS)
    assert list(seen.explained) == sorted(seen.explained, reverse=True)
    assert 0 < sum(seen.explained) <= 1
    projected = seen.arrays["dense.pca"][:, 1:].flatten(0, 1)
    variances, explained = projected.var(0), torch.tensor(seen.explained)
    torch.testing.assert_close(variances / variances[0], explained / explained[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(projected.mean(0), torch.zeros(3), atol=1e-3, rtol=0)


def test_a_run_shows_its_decisions_and_nothing_is_left_on_the_model(model):
    with tiny.left_untouched(model):  # other tests share it
        seen = look_inside(model, IDS, all_four(), attribution=True).arrays
    run = {name.removeprefix("run."): value for name, value in seen.items() if name.startswith("run.")}
    idle, carried = run["active"] == 0, run["carrier"] != torch.arange(len(IDS))
    assert not idle[0].any()
    frozen = idle[1:-1] & ~carried[1:-1]
    assert frozen.any()
    assert carried.any()
    assert (run["drift_l2"][1:-1][frozen] == 0).all()
    assert {16.0} < set(run["bits"].unique().tolist()) <= {2.0, 4.0, 8.0, 16.0}
    assert (run["bits"][0] == 16).all()
    # Whoever is carried has the state of its carrier.
    into = run["carrier"][-1].long()
    for name in ("state_norm", "entropy_nats"):
        torch.testing.assert_close(run[name][-1], run[name][-1][into])
    # Nothing is apart before anything was decided, something after.
    first = int((idle | carried | (run["bits"] != 16)).any(1).nonzero()[0])
    assert (run["sdi_l2"][: first - 1] == 0).all()
    assert run["sdi_l2"][-1].max() > 0


def test_compact_and_masked_show_the_same(model):
    compact, masked = (look_inside(model, IDS, all_four()[:2], execution=how).arrays for how in ("compact", "masked"))
    for name in compact:
        if name != "run.attention_received":  # under masked, whoever was halted is asked about as well
            torch.testing.assert_close(compact[name], masked[name], atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("row", [0, 2])
def test_gradient_times_state_is_the_slope_of_the_loss(model, row):
    token, step = 4, 1e-3
    slope = look_inside(model, IDS, attribution=True).arrays["dense.gradient_x_state"][row, token]

    def loss(factor: float) -> float:
        def scale(_, args):
            states = args[0].clone()
            states[:, token] *= factor
            return (states, *args[1:])

        with torch.no_grad(), architecture_of(model).layers[row].register_forward_pre_hook(scale):
            logits = model(IDS[None], use_cache=False).logits[0]
        return float(F.cross_entropy(logits[:-1].double(), IDS[1:], reduction="sum"))

    assert float(slope) == pytest.approx((loss(1 + step) - loss(1 - step)) / (2 * step), rel=0.05, abs=0.02)


def test_what_a_small_deviation_is_said_to_cost_is_what_it_costs():
    """At 8 bits the states hardly move: there the first-order estimate at the last layer must be the change of the loss."""
    seen = look_inside(tiny.load("llama"), IDS, [AdaptiveQuantization(bits=8, depth=0.4)], attribution=True).arrays
    costs = (seen["run.nll_nats"] - seen["dense.nll_nats"])[1:].sum()
    assert costs != 0
    assert float(seen["run.attributed_nats"][-1].sum()) == pytest.approx(float(costs), rel=0.1, abs=2e-3)


SENTENCES = ["abc defg", "hgf"]


@pytest.fixture(scope="module")
def record(world, tmp_path_factory):
    words = [*world, f"results_dir={tmp_path_factory.mktemp('inside')}", "modules=[halting]", "protocol=continuation"]
    options = ("enabled=true", f"sentences=[{','.join(SENTENCES)}]", "windows=1", "attribution=true")
    words += [f"measure.signals.{option}" for option in options]
    words += [f"modules.halting.{option}" for option in ("tau_drift=p60", "tau_entropy=null", "resume_layers=0")]
    return ensure([compose(words)])[0]


def test_a_record_holds_the_signals_of_its_texts(record):
    texts = record.texts
    assert [text.name for text in texts] == ["sentence 0", "sentence 1", "window 0"]
    assert ["".join(text.tokens) for text in texts[:2]] == SENTENCES
    assert [len(text.tokens) for text in texts] == [8, 3, PROMPT]
    assert PROMPT < WINDOW
    for number, text in enumerate(texts):
        frame = record.signals(number)
        assert len(frame) == (LAYERS + 1) * len(text.tokens)
        assert frame[frame["layer"] == 3]["token"].tolist() == text.tokens
        assert {"drift_relative", "dense_drift_relative", "entropy_nats", "dense_pca_2", "sdi_l2", "attributed_nats"} <= {*frame}
        assert frame["active"].dtype == bool
        halted = frame[~frame["active"]]
        assert (halted["drift_l2"] == 0).all()
        by_token = frame.pivot(index="layer", columns="slot", values="active")
        assert (by_token.astype(int).diff().dropna() <= 0).all(axis=None)  # resume_layers=0: once halted, always halted
    assert not all(record.signals(i)["active"].all() for i in range(3))


def test_tokens_read_as_the_text_does_whatever_the_tokenizer():
    class SentencePiece:
        """Drops the space before the first word, as SentencePiece does; and joins what two bytes make."""

        pieces = ("▁the", "▁fox", "es", "\xc3", "\xa9")

        def decode(self, ids, clean_up_tokenization_spaces):
            assert not clean_up_tokenization_spaces
            text = "".join(self.pieces[i] for i in ids).replace("▁", " ").replace("\xc3\xa9", "é")
            return text.replace("\xc3", "\ufffd").replace("\xa9", "\ufffd").removeprefix(" ")

    assert token_texts(SentencePiece(), [0, 1, 2, 0]) == ["the", " fox", "es", " the"]
    assert token_texts(SentencePiece(), [2, 3, 4]) == ["es", "\ufffd", "\ufffd"]


def test_what_is_not_there_and_a_damaged_file_are_named(record, tmp_path):
    dense = load_record(record.path.parent / record.dense_fingerprint)
    assert not (dense.path / SIGNALS).exists()
    copied = dataclasses.replace(record, path=tmp_path)
    (tmp_path / SIGNALS).write_bytes((record.path / SIGNALS).read_bytes()[:-1] + b"x")
    for of, number, says in ((dense, 0, "measure=signals"), (record, 3, "no text 3"), (copied, 0, SIGNALS)):
        with tiny.refused(says):
            of.signals(number)
