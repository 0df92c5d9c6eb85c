"""cactus_jax: speculative decoding with a divergence budget, in JAX.

The algorithm is in rules.py (the mathematics) and decode.py (`decode_step`, a round in ten lines).

Dimension letters, as in logits_BTV:
  B rows   S slots of a buffer   T tokens of this pass   K drafted tokens a round   V vocabulary   D embedding
  N query heads   G key/value heads   R = N / G   H head dimension   F mlp width   P prompt slots
"""

from cactus_jax.batching import generate_each
from cactus_jax.checkpoint import save_transformer
from cactus_jax.decode import DecodeConfig, DecodeState, Finish, LanguageModel, StepInfo, decode_step, generate, prefill
from cactus_jax.display import show_origins
from cactus_jax.drafts import DraftSource, PromptLookup
from cactus_jax.ledger import Budget, Ledger
from cactus_jax.models.config import ModelConfig
from cactus_jax.models.load import default_draft_path, default_model_path, load_tokenizer, load_transformer
from cactus_jax.models.student import load as load_draft
from cactus_jax.models.transformer import Transformer
from cactus_jax.records import record_class, static
from cactus_jax.rules import (
    OPT,
    RULES,
    Cactus,
    CactusExact,
    Checked,
    Chow,
    Clamp,
    Diff,
    Exact,
    Interpolation,
    Lenience,
    LogitMargin,
    Mentored,
    Static,
    TargetRule,
    Threshold,
    TokenV1,
    TokenV2,
    TokenV3,
    TopK,
    Typical,
    VerificationRule,
)
from cactus_jax.sampling import Draft, SamplingParams
from cactus_jax.schedule import AutoDraft, Costs
from cactus_jax.sharding import make_mesh, narrow
from cactus_jax.text import (
    Completions,
    TextStream,
    calibrate,
    check_tokenizers,
    encode,
    generate_text,
    record_rounds,
    row_keys,
    stream_text,
)
