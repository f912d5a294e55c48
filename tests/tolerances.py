"""Tolerances of the tests of the operator and of converted models. They are never loosened.

Each is a bound on max |a - b| / max(1, max |b|), unless the name says otherwise.
"""

FLOAT64 = 1e-11  # two forms of one function, float64
FLOAT64_GRADIENT = 1e-10
SOFTMAX_FLOAT32 = 1e-6  # the window covers everything: plain softmax attention
CONSTANT_FLOAT32 = 1e-6  # v = 1 gives o = 1
FLOAT32 = 2e-5  # fp32 against float64: outputs
FLOAT32_GRADIENT = 1e-4  # and gradients
EXTREME_FLOAT32 = 1e-3  # feature-map inputs of size 80, fp32 against float64
HALF_LARGE_VALUES = 1e-2  # v of size 1e4 in fp16 against fp32
DRIFT = 1e-2  # relative, the normaliser after 4096 bf16 tokens
LOGITS = 1e-4  # fp32 logits of tiny models, absolute
GUARD = 1e-3  # what switching the linear branch off must change, or the test proves nothing
TEACHER = 1e-5  # softmax mode against the original model
ACCUMULATION = 1e-5  # relative: micro-batches against the large batch
FLOAT16_KERNEL = 4e-3  # kernels with fp16 inputs, features and prefix states in 16 bits: outputs
BFLOAT16_KERNEL = 2e-2  # the same in bf16, and gradients of both
SHARP_FLOAT32 = 2e-4  # q, k, v of size 6, logits around 100, fp32 against float64, gradients too
