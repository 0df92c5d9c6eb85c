"""What the package is and what it needs; the settings of the tools are in pyproject.toml."""

import pathlib

import setuptools

EVAL = ['lm_eval==0.4.13', 'immutabledict', 'langdetect', 'nltk>=3.9.1']  # the last three are for IFEval

setuptools.setup(
  name='cactus-jax',
  version='0.1.0',
  description='Speculative decoding with a divergence budget (Cactus) in JAX',
  long_description=(pathlib.Path(__file__).parent / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  packages=setuptools.find_packages(include=['cactus_jax', 'cactus_jax.*']),
  package_data={'cactus_jax': ['assets/*/*']},
  python_requires='>=3.11,<3.14',
  install_requires=[
    'absl-py',
    'flax>=0.12',
    'gguf>=0.17',
    'huggingface-hub',
    'jax>=0.10,!=0.11.1',  # 0.11.1 copies the whole array at each in-place update on CPU
    'jinja2>=3.1',  # chat templates; transformers does not ask for it by itself
    'numpy>=2',
    'optax>=0.2.6',
    'orbax-checkpoint>=0.11.28',
    'safetensors',
    'tokenizers',
    'tqdm',
    'transformers>=5',
  ],
  extras_require={
    'test': ['hypothesis', 'ipykernel', 'matplotlib', 'nbclient', 'nbformat', 'pytest>=8', 'pytest-xdist', 'scipy',
             *EVAL],
    'eval': EVAL,
    'plot': ['matplotlib'],
    'torch': ['accelerate', 'torch==2.13.0'],  # only to compare with transformers' own models
    'tpu': ['jax[tpu]'],
    'cuda': ['jax[cuda13]'],
  },
)
