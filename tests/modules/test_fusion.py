"""Fusion: who is joined with whom, what the super-token is, that nothing else is touched, and that it leaks where it may not be."""

import itertools
import math
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from looking import Pass, architecture
from thinning import draws

from quicksilver.modules import RandomHalting, TokenFusion, calibrate, shuffled
from quicksilver.modules.fusion import ContextDivergence, NeighbourDistance, group_closest, occurrences
from quicksilver.runtime import UnsupportedModelError, apply
from quicksilver.runtime.cache import CacheLayer


def fuse(fusion: TokenFusion, one: Pass, layer: int = 4, halted: list[list[bool]] | None = None, **seen: torch.Tensor) -> Any:
    """Ask `fusion` after `layer`, once `halted` have; the state of the pass, and the states (B, N, D) it leaves behind."""
    view = one.ask(fusion, layer, halted, **seen)
    return one.state, view.after


def fusing(**options: Any) -> TokenFusion:
    """From half depth on; nobody is protected."""
    return TokenFusion(**{"start": 0.5, "protect_first": 0, "protect_last": 0} | options)


def merged(state: Any) -> torch.Tensor:
    """(B, N) bool: tokens that another one carries."""
    return state.representatives() != torch.arange(state.valid.shape[1])


def touched(state: Any) -> torch.Tensor:
    """(B, N) bool: tokens that are part of a super-token."""
    return merged(state) | (state.size > 1)


# -- who is joined with whom -----------------------------------------------------------------------------------------------------
def one_by_one(distance: list[float], size: list[float], max_group: int | None, k: int | None) -> set[int]:
    """The same choice without vectors: closest first, as long as the group fits. Who joins the token before it."""
    joined: set[int] = set()
    group = list(range(len(distance)))
    for j in sorted((j for j, d in enumerate(distance) if math.isfinite(d)), key=lambda j: (distance[j], j)):
        if k is not None and len(joined) == k:
            break
        both = sum(s for s, g in zip(size, group, strict=True) if g in (group[j], group[j - 1]))
        if max_group is None or both <= max_group:
            joined.add(j)
            group = [group[j] if g == group[j - 1] else g for g in group]
    return joined


@settings(max_examples=draws(60))
@given(
    st.integers(1, 40), st.integers(0, 999), st.sampled_from([None, 2, 3, 5]), st.none() | st.integers(0, 12), st.floats(0, 0.4)
)
def test_the_closest_are_joined_first_as_if_one_by_one(n: int, seed: int, max_group: int | None, k: int | None, holes: float):
    generator = torch.Generator().manual_seed(seed)
    distance = torch.rand(2, n, generator=generator)
    active = torch.rand(2, n, generator=generator) >= holes / 2
    distance[torch.rand(2, n, generator=generator) < holes] = math.inf
    into = group_closest(distance, active, torch.ones(2, n), max_group, None if k is None else torch.tensor([[k], [k]]))
    for row in range(2):
        columns = active[row].nonzero().flatten().tolist()
        if not columns:
            assert into[row].tolist() == list(range(n))
            continue
        d = [math.inf, *distance[row, columns[1:]].tolist()]
        expected = one_by_one(d, [1.0] * len(columns), max_group, k)
        for place, column in enumerate(columns):
            last = place
            while last + 1 in expected:
                last += 1
            assert int(into[row, column]) == columns[last]
        assert (into[row, ~active[row]] == torch.arange(n)[~active[row]]).all()


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(0, 2), st.sampled_from([0.1, 0.3, 0.5]),
    st.sampled_from([0, 1, 2]), st.sampled_from([None, 4]), st.sampled_from(["l2", "cosine", "relative", "random"]),
)  # fmt: skip
def test_capacity_merges_exactly_its_share_of_each_row(lengths, extra, share, every, max_group, criterion):
    if max_group is not None and max_group > max(lengths):
        return
    one = Pass(lengths, extra=extra)
    fusion = fusing(rule="capacity", fused_share=share, every=every, max_group=max_group, criterion=criterion)
    assert not fusion.causal
    state = one.run(fusion)
    for row, n in enumerate(lengths):
        possible = n - 1 if max_group is None else n - math.ceil(n / max_group)
        k = math.floor(share * n + 0.5)
        fused = int(merged(state)[row].sum())
        assert fused == k or (k > possible * 0.6 and fused <= k)
        assert int(state.size[row][state.valid[row] & ~merged(state)[row]].sum()) == n
    if max_group is not None:
        assert float(state.size.max()) <= max_group


@settings(max_examples=draws(40))
@given(st.data())
def test_a_halted_token_is_not_fused_and_separates_those_beside_it(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 20))
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    halted = [data.draw(flags), data.draw(flags)]
    fusion = fusing(every=1, tau_fuse=data.draw(st.floats(2, 6)))
    one = Pass([n, n])
    state, _ = fuse(fusion, one, 4, halted)
    state, _ = fuse(fusion, one, 5)
    into = state.representatives()
    for row in range(2):
        for t in range(n):
            if into[row, t] != t:
                assert not any(halted[row][t : int(into[row, t]) + 1])
    # Where nothing halted every pair below the threshold goes into the last of its run.
    free = Pass([n])
    state, _ = fuse(fusion, free, 4)
    view, _ = Pass([n]).look(4)
    close = (view.after[0, 1:] - view.after[0, :-1]).norm(dim=-1) < fusion.tau_fuse
    assert merged(state)[0].tolist() == [*close.tolist(), False]


def test_super_tokens_fuse_again_and_weigh_what_they_stand_for() -> None:
    """Chains: the state is the mean of all originals, however many steps it took; `mean` halves at every step."""
    states = torch.tensor([[[0.0], [1.0], [2.0], [9.0]]]).expand(1, 4, 8) * 1.0
    for merge, expected in (("size", (0 + 1 + 2 + 9) / 4), ("mean", ((0 + 1 + 2) / 3 + 9) / 2)):
        one = Pass([4])
        fusion = fusing(every=1, tau_fuse=3.0, merge=merge)
        state, after = fuse(fusion, one, 4, before=states, after=states)
        assert state.representatives().tolist() == [[2, 2, 2, 3]]
        fusion.tau_fuse = 100.0
        state, after = fuse(fusion, one, 5, before=after, after=after)
        assert state.representatives().tolist() == [[3, 3, 3, 3]]
        assert state.size[0, 3] == 4
        torch.testing.assert_close(after[0, 3], torch.full((8,), expected))
    three = torch.tensor([[[0.0], [0.0], [3.0]]]).expand(1, 3, 8) * 1.0
    for merge, expected in (("size", 1.0), ("attention", 1.5)):
        fusion = fusing(tau_fuse=100.0, merge=merge)
        _, after = fuse(fusion, Pass([3]), 4, before=three, after=three, attention=torch.tensor([[0.2, 0.0, 0.2]]))
        torch.testing.assert_close(after[0, 2], torch.full((8,), expected))
        assert [fusion.wants_attention(layer) for layer in (3, 4)] == [False, merge == "attention"]


@given(st.data())
def test_exempt_tokens_are_never_fused(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 24))
    ids = torch.tensor([data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))])
    slots = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    first, last = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    one = Pass([n], ids=ids)
    exempted: dict[str, Any] = {"exempt_ids": [3], "exempt_mask": slots, "protect_first": first, "protect_last": last}
    fusion = fusing(rule="capacity", fused_share=0.9, criterion="random", **exempted)
    state, _ = fuse(fusion, one)
    exempt = (ids[0] == 3) | slots | (torch.arange(n) < first) | (torch.arange(n) >= n - last)
    assert not (touched(state)[0] & exempt).any()


def test_anchors_and_rare_tokens_are_never_fused_even_after_part_of_an_anchor_halted() -> None:
    counts = [100] * tiny.VOCABULARY
    counts[7] = 3
    row = (1, 2, 3, 10, 11, 12, 4, 7, 5, 6, 10, 11, 20, 21, 22, 23)
    batch = tiny.Batch((row, row[:10]), extra=2)
    fusion = fusing(start=0.4, tau_fuse=1e9, anchors=[[10, 11, 12], [20, 21]], token_counts=counts, rare_below=4)
    drop_11 = RandomHalting(rate=0.0, window=(0, 0.2), forced_ids=[11], missing_kv="drop", resume_layers=0)
    for modules in ([fusion], [drop_11, fusion]):
        trace = tiny.forward(tiny.load("gpt2"), batch, modules).trace
        (one,) = trace.passes
        for i, sizes in enumerate(batch.real(one.fusions[0].into - torch.arange(batch.width))):
            fused = {t for t in range(len(batch.rows[i])) if sizes[t] > 0}
            parts = fused | {t + int(sizes[t]) for t in fused}
            assert parts
            assert not parts & ({3, 4, 5, 7} | ({12, 13} if i == 0 else set()))  # 10, 11 without 12 is no anchor
    assert occurrences(torch.tensor([[1, 1, 1, 2]]), [(1, 1)]).tolist() == [[True, True, True, False]]
    assert not occurrences(torch.tensor([[1, 1]]), [(1, 1, 1)]).any()


def test_the_null_is_as_many_random_neighbours() -> None:
    ids = torch.arange(100).expand(2, 100)
    options: dict[str, Any] = dict(rule="capacity", start=0.5, fused_share=0.3)
    states = [fuse(TokenFusion(criterion=c, seed=s, **options), Pass([100, 80], ids=ids))[0] for c, s in
              (("l2", 0), ("random", 0), ("random", 1), ("random", 0))]  # fmt: skip
    assert all(merged(state).sum(1).tolist() == [30, 24] for state in states)
    assert torch.equal(merged(states[1]), merged(states[3]))
    assert not torch.equal(merged(states[1]), merged(states[2]))
    assert not torch.equal(merged(states[0]), merged(states[1]))
    null = TokenFusion(**options).null(1)
    assert torch.equal(merged(fuse(null, Pass([100, 80], ids=ids))[0]), merged(states[2]))
    assert TokenFusion(tau_fuse=1.0).null(1) is None  # its budget is the run's: `shuffled`
    rate = TokenFusion(criterion="random", tau_fuse=0.25, start=0.5, protect_first=0)
    state, _ = fuse(rate, Pass([1000] * 4, ids=torch.arange(1000).expand(4, 1000)))
    assert abs(int(merged(state).sum()) - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)


@given(st.lists(st.integers(6, 40), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 4))
def test_the_least_attended_pairs_fuse_and_never_the_observers(lengths: list[int], extra: int, queries: int) -> None:
    """A pair is attended as its more attended token; its null spares the observers, too."""
    one = Pass(lengths, extra=extra, ids=torch.arange(max(lengths) + extra).expand(len(lengths), -1))
    attention = torch.rand(one.shape, generator=torch.Generator().manual_seed(sum(lengths)))
    fusion = fusing(rule="capacity", criterion="attention", attention_queries=queries, fused_share=0.3, protect_last=1)
    state, _ = fuse(fusion, one, attention=attention)
    null = fusion.null(0)
    by_chance, _ = fuse(null, Pass(lengths, extra=extra, ids=one.ids))
    assert torch.equal(merged(state).sum(1), merged(by_chance).sum(1))
    for row, n in enumerate(lengths):
        columns = range(one.shape[1] - n, one.shape[1] - queries)
        pairs = sorted(itertools.pairwise(columns), key=lambda pair: float(attention[row, list(pair)].max()))
        k = math.floor(0.3 * n + 0.5)
        assert merged(state)[row].nonzero().flatten().tolist() == sorted(t for t, _ in pairs[:k])
        for which in (state, by_chance):
            assert not touched(which)[row, one.shape[1] - queries :].any()


def test_fusion_may_choose_before_halting() -> None:
    """Table 6: with `first="fusion"` a token that is about to halt may be merged instead."""
    halting = RandomHalting(rate=0.0, window=(0.2, 0.8), forced_ids=list(range(3, 20)), missing_kv="drop", resume_layers=0)
    for first, fused in (("halting", 0), ("fusion", 14)):
        fusion = TokenFusion(start=0.2, tau_fuse=1e9, first=first, protect_first=2, protect_last=1)
        run = tiny.forward(tiny.load("gpt2"), tiny.Batch((tuple(range(3, 20)),)), [halting, fusion])
        assert int((run.trace.passes[0].fused_layer < tiny.LAYERS - 1).sum()) == max(0, fused - 1)


# -- pairs that are no neighbours, contexts --------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gpt_neox"])
def test_tokens_apart_fuse_where_query_and_key_agree(family: str) -> None:
    model = tiny.load(family)
    options: dict[str, Any] = dict(start=0.4, tau_fuse=1e9, exempt_ids=[2, 4], protect_first=0, protect_last=0, max_group=2)
    batch = tiny.Batch(((1, 2, 1, 4, 1, 2, 3, 2), (5, 2, 6, 2, 7)))
    alone = tiny.forward(model, batch, [TokenFusion(**options)]).trace.passes[0]
    assert not alone.fusions  # exempt tokens separate the others
    run = tiny.forward(model, batch, [TokenFusion(tau_attention=-1.0, **options)])
    (event,) = run.trace.passes[0].fusions
    moves = event.into != torch.arange(batch.width)
    assert 1 <= int(moves.sum()) <= 3
    assert (event.into >= torch.arange(batch.width)).all()
    assert not torch.isin(batch.ids[moves], torch.tensor([2, 4])).any()
    assert run.run.flops.signals > 0
    assert not tiny.forward(model, batch, [TokenFusion(tau_attention=1.0, **options)]).trace.passes[0].fusions


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 9))
def test_a_context_is_the_mean_of_the_active_tokens_around(lengths: list[int], extra: int, window: int) -> None:
    one = Pass(lengths, extra=extra)
    view, tokens = one.look(3)
    tokens.halt(view.slots % 5 == 3, missing_kv="drop")
    contexts = ContextDivergence(window=window).states(view, tokens)
    for row in range(len(lengths)):
        columns = tokens.active[row].nonzero().flatten().tolist()
        for place, column in enumerate(columns):
            around = columns[max(0, place - window // 2) : max(0, place - window // 2) + window]
            torch.testing.assert_close(contexts[row, column], view.after[row, around].mean(0), atol=1e-5, rtol=1e-5)


def test_tokens_of_diverging_contexts_stay_apart() -> None:
    options: dict[str, Any] = {"start": 0.5, "tau_fuse": 100.0, "context_window": 4}
    fused = [int(merged(fuse(TokenFusion(tau_context=tau, **options), Pass([40]))[0]).sum()) for tau in (0.0, 1.0, 100.0)]
    assert 0 == fused[0] < fused[1] < fused[2] == 34


# -- execution -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("share", "gone"), [(0.5, 5 + 4 + 4), (1.0, 8 + 6 + 6)])
def test_decoding_merges_exactly_its_share_whatever_the_batch_and_cannot_be_shuffled(share: float, gone: int) -> None:
    """17 tokens follow a prompt of 10: of every 8, the share goes, or all entries but the newest go into one."""
    fusion = TokenFusion(start=0.4, fused_share=share, decode_every=8, protect_first=0, rule="capacity")
    model = tiny.load("gpt2")

    def decode(batch: tiny.Batch) -> tuple[tiny.Outcome, list[int]]:
        outcome = tiny.forward(model, batch, [fusion], chunks=[batch.width - 17, *[1] * 17])
        cache: Any = outcome.run._cache
        return outcome, [layer.lengths.tolist()[0] for layer in cache.layers]

    together, _ = decode(tiny.Batch((tuple(range(1, 28)), tuple(range(30, 50)))))
    alone, lengths = decode(tiny.Batch((tuple(range(1, 28)),)))
    first = fusion.layers[0]
    assert lengths == [27] * (first + 1) + [27 - gone] * (tiny.LAYERS - first - 1)
    assert {merge.layer for one in alone.trace.passes for merge in one.merges} == set(range(first + 1, tiny.LAYERS))
    tiny.assert_close(alone.logits[0], together.logits[0], atol=2e-5)
    with tiny.refused(r"merged while decoding cannot be shuffled.*decode_every=0"):
        shuffled(alone.trace, 0)


@given(st.integers(0, 99), st.integers(2, 12))
def test_merged_entries_are_means_by_size_in_both_caches(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 3, n, 4, generator=generator) for _ in range(2))
    entries = {"slots": torch.arange(n).expand(2, n), "size": torch.randint(1, 4, (2, n), generator=generator).float()}
    joined = torch.rand(2, n, generator=generator) < 0.5
    into = group_closest(torch.where(joined, 0.0, math.inf), torch.ones(2, n, dtype=torch.bool), entries["size"], None, None)
    ragged, masked = CacheLayer("ragged"), CacheLayer("masked")
    for layer in (ragged, masked):
        layer.write(layer.plan(entries, None), keys, values)
        layer.advance(n, torch.full((2, 1), n))
        layer.merge(into)
        k, v = layer.padded()
        for row in range(2):
            kept = layer.is_entry[row].nonzero().flatten().tolist()
            assert layer.slots[row, kept].tolist() == into[row].unique().tolist()
            for column, slot in zip(kept, into[row].unique().tolist(), strict=True):
                parts = into[row] == slot
                share = entries["size"][row, parts] / entries["size"][row, parts].sum()
                for got, states in ((k, keys), (v, values)):
                    torch.testing.assert_close(got[row, :, column], (states[row, :, parts] * share[:, None]).sum(1))
    if bool((into != torch.arange(n)).any()):
        with tiny.refused(r"last 1 cached columns cannot be taken back.*decode_every=0", UnsupportedModelError):
            ragged.crop(-1)


# -- proportional attention ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_proportional_attention_is_attention_to_the_duplicates(attention: str) -> None:
    """Without positions, and where the layers before have done nothing, equal tokens are equal states: one that counts three is
    three."""
    model = tiny.build("llama", num_hidden_layers=3)
    model.set_attn_implementation(attention)
    model.model.rotary_emb.inv_freq.zero_()
    with torch.no_grad():
        for layer in model.model.layers[:2]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    batch = tiny.Batch(((1, 2, 9, 9, 9, 3, 4, 5, 5, 6), (8, 8, 1, 2, 3)))
    fusion = TokenFusion(start=0.7, tau_fuse=1e-4, proportional=True, protect_first=0, protect_last=0)
    plain = batch.real(tiny.forward(model, batch, []).logits)
    for execution, proportional in itertools.product(("compact", "masked"), (True, False)):
        fusion.proportional = proportional
        run = tiny.forward(model, batch, [fusion], execution=execution)
        gone = batch.real(run.trace.passes[0].fused_layer < 2)
        assert [row.nonzero().flatten().tolist() for row in gone] == [[2, 3, 7], [0]]
        apart = [(a - b)[~row].abs().max() for a, b, row in zip(plain, batch.real(run.logits), gone, strict=True)]
        assert max(apart) < 2e-5 if proportional else min(apart) > 1e-2


# -- nulls, calibration ----------------------------------------------------------------------------------------------------------
def test_a_percentile_fuses_that_share_of_the_pairs() -> None:
    model = tiny.load("gpt2")
    windows = torch.randint(0, tiny.VOCABULARY, (12, 64), generator=torch.Generator().manual_seed(0))
    fusion = TokenFusion(tau_fuse="p15", tau_context="p80", context_window=8, start=0.4, protect_first=0, protect_last=0)
    assert [s.key for s in fusion.calibration_signals()] == ["context-l2-8", "neighbour-l2"]
    fusion.calibration = calibrate(model, windows, signals=fusion.calibration_signals())
    assert not fusion.calibration_signals()
    with torch.no_grad(), apply(model, [fusion]) as run:
        model(windows)
    share = int((run.trace.passes[0].fused_layer < tiny.LAYERS - 1).sum()) / (12 * 63)
    assert 0.5 * 0.15 * 0.8 < share < 0.16
    assert NeighbourDistance("cosine").key != NeighbourDistance("l2").key


# -- the leak --------------------------------------------------------------------------------------------------------------------
def copying_model() -> Any:
    """A model whose layers do nothing and whose head is its embedding: it predicts the token it was given."""
    model = tiny.build("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                projection.weight.zero_()
                projection.bias.zero_()
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight.copy_(F.normalize(model.transformer.wte.weight, dim=-1))
        model.transformer.ln_f.weight.fill_(0.6)
        model.transformer.ln_f.bias.zero_()
    return model


def test_fusing_with_the_next_token_tells_it() -> None:
    """Of random tokens nobody can say the next one better than by chance. A model that is let fuse t with t + 1 does."""
    model = copying_model()
    windows = torch.randint(0, tiny.VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(0))
    fusion = fusing(rule="capacity", criterion="random", fused_share=0.45, max_group=2, start=0.2, lookahead=True)
    with torch.no_grad(), apply(model, [fusion]) as run:
        logits = model(windows).logits
    saw = (run.trace.passes[0].fused_layer < tiny.LAYERS - 1)[:, :-1]
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), windows[:, 1:], reduction="none")
    assert float(nll[saw].mean()) < 0.6 * math.log(tiny.VOCABULARY) < math.log(tiny.VOCABULARY) < float(nll[~saw].mean())


@pytest.mark.slow
def test_who_reads_the_fused_states_beats_the_model() -> None:
    """docs/fusion-and-causality.md: a linear readout, trained on other windows, of stories260K's states where t saw t + 1."""
    model = tiny.load(tiny.STORIES)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(torch.ones(48, 1, dtype=torch.long), do_sample=True, max_new_tokens=255, min_new_tokens=255,
                             suppress_tokens=[1, 2], pad_token_id=0, attention_mask=torch.ones(48, 1))  # fmt: skip
    found: dict[str, list[torch.Tensor]] = {"dense": [], "fused": [], "answers": [], "window": []}
    options: dict[str, Any] = {
        "start": 0.6, "fused_share": 0.3, "criterion": "random", "max_group": 2, "lookahead": True, "rule": "capacity",
    }  # fmt: skip
    for seed in range(3):
        for name, execution in (("dense", "decide"), ("fused", "compact")):
            with torch.no_grad(), apply(model, [TokenFusion(seed=seed, **options)], execution=execution) as run:
                last = model.model(ids, use_cache=False).last_hidden_state
            saw = (run.trace.passes[0].fused_layer < model.config.num_hidden_layers - 1)[:, :-1]
            found[name].append(last[:, :-1][saw])
        found["answers"].append(ids[:, 1:][saw])
        found["window"].append(saw.nonzero()[:, 0])
    dense, fused, answers, window = map(torch.cat, found.values())
    train = window < 36
    readout = torch.nn.Linear(*model.lm_head.weight.shape[::-1])
    with torch.no_grad():
        readout.weight.copy_(model.lm_head.weight)
        readout.bias.zero_()
    optimizer = torch.optim.AdamW(readout.parameters(), lr=3e-3, weight_decay=0.1)
    for _ in range(20):
        for part in torch.randperm(int(train.sum())).split(512):
            optimizer.zero_grad()
            F.cross_entropy(readout(fused[train][part]), answers[train][part]).backward()
            optimizer.step()
    with torch.no_grad():
        logits = {"dense": model.lm_head(dense), "fused": model.lm_head(fused), "read out": readout(fused)}
    ppl = {name: math.exp(F.cross_entropy(x[~train], answers[~train])) for name, x in logits.items()}
    assert ppl["read out"] < 0.85 * ppl["dense"] < ppl["dense"] < ppl["fused"], ppl


def test_it_acts_from_its_start_on() -> None:
    for options, layers in (({}, [11]), ({"every": 6}, [11, 17, 23]), ({"start": 0.9, "every": 1}, [26, 27, 28])):
        fusion = TokenFusion(rule="capacity", **options)
        fusion.bind(architecture(30))
        assert [layer for layer in range(30) if fusion.acts_at(layer)] == layers  # 0.4 of 30: after the twelfth (G.3)
