"""Writes logits.npz, what transformers gives for a tiny checkpoint of every family: python -m tests.golden.make

Weights and tokens come from a generator that is frozen, so the file can be checked without torch.
"""

import pathlib
import tempfile

import numpy as np
import torch
import transformers

from tests import checkpoints

PATH = pathlib.Path(__file__).parent / 'logits.npz'
LAST = 4  # positions of each row that are kept


def logits(tokens_BT):
  """{name of a config in FAMILIES: f32[B, LAST, V]}."""
  result = {}
  for name, config in checkpoints.FAMILIES.items():
    with tempfile.TemporaryDirectory() as folder:
      checkpoints.write_folder(pathlib.Path(folder), config)
      model = transformers.AutoModelForCausalLM.from_pretrained(
          folder, dtype=torch.float32, attn_implementation='eager').eval()
      with torch.no_grad():
        result[name] = model(torch.tensor(tokens_BT)).logits[:, -LAST:].numpy()
  return result


def main():
  tokens_BT = np.random.RandomState(0).randint(0, checkpoints.CONFIG['vocab_size'], (2, 19))
  np.savez_compressed(PATH, tokens=tokens_BT, **logits(tokens_BT))


if __name__ == '__main__':
  main()
