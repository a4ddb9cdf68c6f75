"""Deciders: rules that decide whether a prompt is computed on another replica than the one that decodes.

Source: llm-d-router, `scheduling/profilehandler/disagg`; BLIS `--pd-decider`; Dynamo's conditional disaggregation.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vajra_policies.routers.load_scorers import NoParameters
from vajra_policies.routers.prefix_matches import OfPrefixProducer, matches_of
from vajra_py.contract import (
    PrefixMatches,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)


class Always:
    """Decides to disaggregate every prompt, or none."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def disaggregates(self, request: RequestView, decode: ReplicaLoadView, now: float) -> bool:
        """Return True if every prompt is disaggregated, False if none is."""
        return self._answer


class PrefixBasedConfig(OfPrefixProducer):
    """Parameters of `prefix-based-pd-decider`."""

    non_cached_tokens: int = Field(
        0, ge=0, description="Uncached prompt tokens from which on a prompt is computed apart; 0: never."
    )
    prompt_tokens: int = Field(0, ge=0, description="Prompts shorter than this are never computed apart.")
    comparison: Literal[">=", ">"] = Field(
        ">=",
        description="Comparison with the threshold: `>=` as in llm-d; `>` as in BLIS, for which 0 is no special case.",
    )


class PrefixBased:
    """Disaggregates a prompt if the decode replica would have to compute many of its tokens: prompt tokens - cached
    tokens >= `non_cached_tokens` (or >, by `comparison`).
    """

    def __init__(self, config: PrefixBasedConfig, matches: PrefixMatches) -> None:
        self._config = config
        self._matches = matches

    def disaggregates(self, request: RequestView, decode: ReplicaLoadView, now: float) -> bool:
        """Return True if the prompt is long enough and has enough uncached tokens on the decode replica."""
        config, prompt = self._config, request.num_prompt_tokens
        is_strict = config.comparison == ">"
        if not is_strict and not config.non_cached_tokens:
            return False
        if prompt < config.prompt_tokens:
            return False
        uncached = prompt - int(self._matches.matched_blocks(request, [decode])[0]) * self._matches.block_size
        return uncached > config.non_cached_tokens if is_strict else uncached >= config.non_cached_tokens


class IslBoundingConfig(OfPrefixProducer):
    """Parameters of `isl-bounding-decider`."""

    eff_isl_threshold: int = Field(2048, ge=0, description="Uncached tokens below which a prompt may stay, tokens.")
    eff_isl_ratio_threshold: float = Field(0.7, ge=0, description="Uncached fraction below which a prompt may stay.")


class IslBounding:
    """Disaggregates a prompt unless its uncached tokens are fewer than a threshold and fewer than a fraction of the
    prompt.
    """

    def __init__(self, config: IslBoundingConfig, matches: PrefixMatches) -> None:
        self._config = config
        self._matches = matches

    def disaggregates(self, request: RequestView, decode: ReplicaLoadView, now: float) -> bool:
        """Return False if the uncached tokens are below both bounds; both comparisons are strict."""
        prompt = request.num_prompt_tokens
        uncached = prompt - int(self._matches.matched_blocks(request, [decode])[0]) * self._matches.block_size
        is_short = uncached < self._config.eff_isl_threshold
        return not (is_short and uncached < self._config.eff_isl_ratio_threshold * prompt)


def _always(config: NoParameters, context: RoutingContext) -> Always:
    return Always(True)


def _never(config: NoParameters, context: RoutingContext) -> Always:
    return Always(False)


def _prefix_based(config: PrefixBasedConfig, context: RoutingContext) -> PrefixBased:
    return PrefixBased(config, matches_of(context, config.prefix_match_info_producer_name))


def _isl_bounding(config: IslBoundingConfig, context: RoutingContext) -> IslBounding:
    return IslBounding(config, matches_of(context, config.prefix_match_info_producer_name))


SPECS = (
    RoutingPartSpec(
        name="always-disagg-pd-decider",
        kind=RoutingPartKind.DECIDER,
        config=NoParameters,
        build=_always,
        summary="Every prompt is computed apart from its decode replica.",
        source="llm-d always-disagg-pd-decider",
    ),
    RoutingPartSpec(
        name="never-disagg-pd-decider",
        kind=RoutingPartKind.DECIDER,
        config=NoParameters,
        build=_never,
        summary="Every prompt is computed where it decodes.",
        source="BLIS --pd-decider never",
    ),
    RoutingPartSpec(
        name="prefix-based-pd-decider",
        kind=RoutingPartKind.DECIDER,
        config=PrefixBasedConfig,
        build=_prefix_based,
        summary="Prompts with many tokens that the decode replica has not cached are computed apart.",
        source="llm-d prefix-based-pd-decider; BLIS prefix-threshold",
    ),
    RoutingPartSpec(
        name="isl-bounding-decider",
        kind=RoutingPartKind.DECIDER,
        config=IslBoundingConfig,
        build=_isl_bounding,
        summary="Prompts with few uncached tokens, in number and as a fraction, are computed where they decode.",
        source="Dynamo conditional disaggregation, isl_bounding",
    ),
)
