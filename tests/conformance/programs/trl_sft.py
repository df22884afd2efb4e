"""TRL's own script for supervised tuning, through ``everybit_torch.names.run``, with a model and text that are made here."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    letters = {chr(code): code - 32 for code in range(32, 127)} | {"<end>": 95}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<end>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<end>", pad_token="<end>", unk_token="<end>"
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        eos_token_id=95, pad_token_id=95,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [json.dumps({"text": line}) for line in Path(__file__).read_text().splitlines() if line] * 4
    (folder / "data" / "train.jsonl").write_text("\n".join(rows))
    command = [
        sys.executable, "-m", "everybit_torch.names.run", "trainer", "-m", "trl.scripts.sft",
        "--model_name_or_path", str(folder / "model"), "--dtype", "bfloat16", "--bf16", "false", "--dataset_name", str(folder / "data"),
        "--optim", "everybit_adamw", "--optim_args", "policy=LEAN_BF16,compile=false", "--learning_rate", "1e-2", "--max_steps", "6",
        "--save_steps", "3", "--logging_steps", "1", "--output_dir", str(folder / "out"), "--report_to", "none", "--use_cpu", "true",
        "--max_length", "32", *sys.argv[1:],
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = torch.load(folder / "out" / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert "param.remainder" in saved["state"][0], list(saved["state"][0])
    print(done.stdout)  # noqa: T201
