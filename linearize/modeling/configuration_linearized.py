"""The section `linearize_config` of a model's config: what was converted, and into what."""

from dataclasses import asdict, dataclass, field

FORMAT_VERSION = 1
MIXING_RULES = ("calibrated", "lolcats", "kernel")
K_MAPS = ("kv_head", "q_head")
WINDOW_KINDS = ("sliding", "terrace")


@dataclass(frozen=True)
class LinearizeConfig:
    """What was converted, and into what; `model.config.linearize_config` is its dict form.

    layers are the indices of the linearized layers; softmax_heads {layer: [key/value heads]} those
    of their heads that stay softmax, with the query heads of their groups; window the number of
    exact keys including the query's own; sinks the number of first tokens that stay exact;
    feature_dim the size of a feature map's projection (None: the map's own default); mixing, k_map
    and window_kind one of MIXING_RULES, K_MAPS and WINDOW_KINDS; geometry {layer: {num_heads,
    num_key_value_heads, qk_dim, v_dim, scaling}} as seen by the attention function. delta, in an
    adapter-only repository: {base_model, revision, subfolder, base_hash}.
    """

    base_model_type: str
    layers: list
    geometry: dict
    window: int = 64
    sinks: int = 4
    feature_map: str = "hedgehog"
    feature_dim: int | None = None
    mixing: str = "calibrated"
    k_map: str = "kv_head"
    seed: int = 0
    softmax_heads: dict = field(default_factory=dict)
    window_kind: str = "sliding"
    delta: dict | None = None
    version: int = field(default=FORMAT_VERSION)

    def __post_init__(self):
        if self.version > FORMAT_VERSION:
            raise ValueError(
                f"linearize_config.version: {self.version} is newer than this code "
                f"({FORMAT_VERSION}); update linearize"
            )
        for name, low in (("window", 1), ("sinks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(
                    f"convert.{name}: {value!r} is not allowed; give a whole number of at least "
                    f"{low}"
                )
        for name, allowed in (
            ("mixing", MIXING_RULES),
            ("k_map", K_MAPS),
            ("window_kind", WINDOW_KINDS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"convert.{name}: {value!r} is not known; choose one of {', '.join(allowed)}"
                )

        self._check_softmax_heads()

    def _check_softmax_heads(self):
        for layer, heads in self.softmax_heads.items():
            key = f"convert.softmax_heads: layer {layer}"
            if layer not in self.geometry:
                raise ValueError(
                    f"{key} is not converted, so its heads are softmax anyway; leave it out"
                )
            last = self.geometry[layer]["num_key_value_heads"] - 1
            wrong = [g for g in heads if g not in range(last + 1)]
            if wrong:
                raise ValueError(f"{key} has the key/value heads 0-{last}, not {wrong[0]}")

    def linear_heads(self, layer):
        """The key/value heads of a converted layer that are linear."""
        kept = self.softmax_heads.get(str(layer), ())
        return tuple(
            g for g in range(self.geometry[str(layer)]["num_key_value_heads"]) if g not in kept
        )

    @classmethod
    def from_dict(cls, section):
        """The section read back from a config; keys of a later format are refused by name."""
        unknown = sorted(set(section) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"linearize_config: unknown key {unknown[0]!r}; update linearize to load this "
                "checkpoint"
            )
        return cls(**section)

    def to_dict(self):
        return asdict(self)
