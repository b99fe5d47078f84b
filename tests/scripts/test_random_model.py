"""A recipe on random weights of the true shape: the same commands, memory and operations as with those of the hub."""

import subprocess
import sys

import pytest
import random_model
import tiny

from quicksilver.records.record import record_frame
from quicksilver.runs import estimate
from quicksilver.runs.config import compose


def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "tokenizer.json").write_text("{}")
    for name, folder, tokenizer, says in (
        ("gpt9", "new", "there", "gpt9: its shape is not known. There are: gpt2-large, llama2-7b"),
        ("gpt2-large", "new", "", "there is no tokenizer.json"),
        ("gpt2-large", "there", "there", "has something in it"),
    ):
        assert random_model.main([name, str(tmp_path / folder), "--tokenizer", str(tmp_path / tokenizer)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_gpt2_large_end_to_end(tmp_path):
    """774 million random parameters, one window of WikiText-103: planned, drawn, run, and what the plan said of it holds."""
    root, folder = tiny.data_folder(), tmp_path / "gpt2-large"
    assert random_model.write("gpt2-large", folder, root / "gpt2-tokenizer") == 774_030_080
    words = [
        "model=gpt2-large", f"model.path={folder}", "model.device_map=cpu", "dataset=wikitext103", "dataset.windows=2", "protocol.batch_size=1",
        "modules=[static_depth]", "modules.static_depth.depth=0.5", "measure=sweep", f"data.root={root}", f"results_dir={tmp_path / 'results'}",
    ]  # fmt: skip
    made = subprocess.run([sys.executable, "-m", "quicksilver", "run", *words], capture_output=True, text=True, timeout=3000)
    assert made.returncode == 0, made.stderr
    unmade = compose([*words, f"results_dir={tmp_path / 'none'}"])  # the estimate leaves out a dense run that is there
    dense, ours = estimate.estimates([unmade], 1e12)
    assert dense.weights_bytes == 4 * 774_030_080
    frame = record_frame(tmp_path / "results")
    one, other = (frame[frame["dense_fingerprint"].isna() == is_dense].iloc[0] for is_dense in (True, False))
    config = compose(words)
    window = estimate.window_flops(estimate.shape_of(config.model), config.protocol.window_tokens)
    assert one["executed_flops"] == pytest.approx(2 * window, rel=0.01)
    assert 0.4 * one["executed_flops"] < other["executed_flops"] < 0.7 * one["executed_flops"]
    assert ours.flops > dense.flops
