"""The section `preference`: how a model learns which of two answers is better. Rules between keys are in `spec`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sftplay.config.section import WITH_HOME, Auto, NotNegative, PositiveFloat, Section

PairLoss = Literal["sigmoid", "hinge", "robust"]
Reference = Annotated[str, WITH_HOME]


class PreferenceConfig(Section):
    """How a model learns which of two answers is better (task modes dpo, ipo, kto, orpo and simpo). A row is a pair, or
    in kto an answer with a verdict; train.effective_batch_size counts them."""

    loss: PairLoss = "sigmoid"
    """dpo: the function of the margin that is minimised. sigmoid (DPO), hinge (SLiC), or robust, which expects a share
    label_smoothing of the labels to be swapped. TRL's default is sigmoid."""

    beta: PositiveFloat | None = None
    """How strongly the model is held to the reference (dpo, ipo, kto); the weight of the odds ratio (orpo); the scale
    of the margin (simpo). None means what its paper uses: 0.1, in simpo 2."""

    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """dpo with loss sigmoid or robust: the share of pairs that are taken to be swapped. 0 trusts every label, as TRL
    does."""

    reference: Reference = "start"
    """The model that dpo, ipo and kto measure distance to. start: the model that the run starts from. adapter_off: its
    base, without the adapter. A path or a name: that model. none: no model, only the probabilities themselves count.
    Its log-probabilities are computed once and kept next to the data."""

    rpo_alpha: NotNegative = 0.0
    """dpo, ipo: weight of the mean log-likelihood of a token of the chosen answer, which keeps it from falling. 1 is
    usual; 0 leaves it out."""

    gamma: NotNegative = 1.0
    """simpo: the margin by which the chosen answer shall be ahead. Its paper has half of beta."""

    desirable_weight: PositiveFloat = 1.0
    """kto: weight of an answer that is wanted. Times their number it should be 1 to 4/3 of the others' weight."""

    undesirable_weight: PositiveFloat = 1.0
    """kto: weight of an answer that is not wanted."""

    shared_prompt: bool | Auto = "auto"
    """Compute the prompt of a pair once for both answers. auto: where a proof with the model's own weights shows that
    the answers do not see each other, else in two rows. true refuses a model that fails it; false uses two rows."""


SECTION = PreferenceConfig
