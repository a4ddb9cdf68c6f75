"""Are the built-in policies found like anyone's, and does their page say what they do?"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vajra_policies
from vajra_py.contract import AnyPolicySpec, CountsKeyChanges, KeyMotion, Layer, PolicyAt, PolicySpec
from vajra_py.experiment.atlas.cards import statement_of
from vajra_py.plugins import load_registry, parameters_of
from vajra_py.testing import Harness, HarnessOptions

OWN = {
    Layer.REQUEST_PRIORITIZER: {
        *("fcfs", "edf", "lrs", "priority", "vtc", "least_counter_first", "deficit_round_robin"),
        *("sjf", "srpt", "trail", "ltr", "hrrn", "skip_join_mlfq", "qoserve"),
        *("lpm", "preflow", "residual_sjf", "dlpm", "least_attained_service", "justitia", "continuum", "parrot"),
        *("jitserve", "andes", "qlm", "kairos", "equinox"),
    },
    Layer.REPLICASET_SCHEDULER: {
        "round_robin",
        "pull",
        "least_loaded",
        "power_of_two",
        "random",
        "prefix_affinity",
        "endpoint_picker",
        "dynamo_kv_router",
        "sglang_cache_aware",
        "preble_e2",
        "lmetric",
        "consistent_hashing",
        "mooncake_conductor",
        "d2lpm",
        "polyserve",
        "dynaserve",
        "ascendra",
        "cascadeinfer",
        "dlora_migration",
    },
    Layer.REPLICA_SCHEDULER: {
        *("fixed_chunk", "dynamic_chunk", "space_sharing"),
        *("preemptive", "slack_chunk", "past_future", "hygen", "scorpio"),
        *("p_pas", "min_chunk_hold", "prefill_waves", "mixed_prefill_governor"),
        *("conserve", "micro_requests", "slos_serve", "adaserve", "blendserve", "sliding_serve"),
        *("chameleon", "dlora"),
    },
}
NAMES = sorted(name for names in OWN.values() for name in names)


def spec_of(name: str) -> PolicySpec:
    (policy,) = [one for one in vajra_policies.vajra_policies() if one.name == name]
    return policy.load()


@pytest.mark.parametrize("layer", Layer, ids=lambda layer: layer.value)
def test_installed_under_their_layer(layer: Layer) -> None:
    offered = load_registry().policies(layer)
    assert OWN[layer] <= set(offered)
    assert {offered[name].package for name in OWN[layer]} == {"vajra-py"}


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_it_follows(name: str) -> None:
    spec = spec_of(name)
    assert spec.summary.endswith(".")
    assert spec.source
    assert all(field.description for field in spec.config.model_fields.values())


def test_importing_the_package_imports_no_policy() -> None:
    code = "import sys, vajra_policies; print([m for m in sys.modules if m.startswith('vajra_policies.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_policies_and_presets_of_other_systems_come_along() -> None:
    from vajra_policies.systems.presets import PRESETS

    systems = ["vllm_v1", "nano_vllm", "minivllm", "nano_vllm_rs", "orca"]
    assert [policy.name for policy in vajra_policies.vajra_policies()][-len(systems) :] == systems
    assert vajra_policies.vajra_presets() == list(PRESETS)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_describes_every_parameter_with_its_default(name: str, repository_root: Path) -> None:
    page = (repository_root / "docs" / "reference" / "policies.md").read_text(encoding="utf-8")
    section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert section, f"no section on {name}"
    assert f"[`{name}`](#{name})" in page
    shared = page.partition("## Replica schedulers")[2].partition("\n### ")[0]
    for parameter in parameters_of(spec_of(name).config):
        row = re.search(rf"^\|[^|]*`{parameter.name}`[^|]*\|([^|]*)\|", section + "\n" + shared, re.MULTILINE)
        assert row, f"{name} has a parameter {parameter.name}, which the page does not mention"
        documented = row[1].strip().strip("`")
        assert documented in (str(parameter.default), str(parameter.default).lower(), "as above")


@pytest.mark.parametrize("name", NAMES)
def test_each_says_when_to_use_it_and_when_not_and_the_page_says_the_same(name: str, repository_root: Path) -> None:
    advice = spec_of(name).advice
    assert re.match(r"Use it .*[.)] Not .*\.$", advice)
    page = (repository_root / "docs" / "reference" / "policies.md").read_text(encoding="utf-8")
    section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(section.split()).replace("**", ""))
    assert advice in plain


DEAR = {"andes", "jitserve", "least_attained_service"}
"""Prioritizers whose cards tell that a step with a long queue takes more than three times as long as under `fcfs`."""


@pytest.mark.parametrize("name", sorted(load_registry().policies(Layer.REQUEST_PRIORITIZER)))
def test_a_prioritizer_declares_how_keys_move_or_its_card_tells_what_long_queues_cost(
    name: str, repository_root: Path
) -> None:
    page = (repository_root / "docs" / "reference" / "policies.md").read_text(encoding="utf-8")
    card = " ".join(page.partition(f"\n### {name}\n")[2].partition("\n### ")[0].split())
    told = re.search(
        r"a step with 10,000 waiting requests(?: of 1,000 programs)? takes ([\d.,]+)( to [\d.,]+)? times the CPU time of a step under `fcfs`",
        card,
    )
    prioritizer = Harness(name, "round_robin", "fixed_chunk", HarnessOptions()).prioritizer
    motion = prioritizer.key_motion
    if motion in (KeyMotion.ARBITRARY, KeyMotion.VOLATILE):
        assert f"Keys are `{motion.name}`" in card
        assert name in DEAR or isinstance(prioritizer, CountsKeyChanges)
    assert (name in DEAR) == (told is not None and float(told[1].replace(",", "")) > 3)


ADVISED: dict[str, tuple[AnyPolicySpec, str]] = {
    **{f"policy {policy.name}": (policy.load(), "") for policy in vajra_policies.vajra_policies()},
    **{f"admission {spec.name}": (spec, "reference/policies.md") for spec in vajra_policies.vajra_admission_policies()},
    **{f"retention {spec.name}": (spec, "reference/policies.md") for spec in vajra_policies.vajra_retention_policies()},
    **{f"scaler {spec.name}": (spec, "scaling.md") for spec in vajra_policies.vajra_scalers()},
}
"""Every policy that a file may name, and the page that repeats its advice, where one test covers all of its kind."""


PUBLISHED = [one for one in vajra_policies.vajra_policies() if re.match(r"vajra_policies\.(?!systems)\w+\.", one.place)]
"""Policies of papers and of other systems' routers: those in the folders of the library."""


@pytest.mark.parametrize("policy", PUBLISHED, ids=lambda policy: policy.name)
def test_each_published_policy_names_its_source_and_says_what_it_leaves_out(policy: PolicyAt) -> None:
    build = policy.load().build
    card = f"{inspect.getdoc(inspect.getmodule(build))}\n{statement_of(build)}"
    assert re.search(r"^ *(Also )?[Ss]ource: ", card, re.MULTILINE), "no source"
    assert re.search(r"\b[Ll]eft out: |\bis left out\b", card), "nothing is said about what is left out"


def test_every_policy_says_when_to_use_it_and_when_not(repository_root: Path) -> None:
    for what, (spec, page) in ADVISED.items():
        assert re.match(r"Use it .*[.)] Not .*\.$", spec.advice), what
        if page:
            text = (repository_root / "docs" / page).read_text(encoding="utf-8")
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()).replace("**", ""))
            assert spec.advice in plain, what


ADMISSION = {spec.name: spec for spec in vajra_policies.vajra_admission_policies()}


@pytest.mark.parametrize("name", ADMISSION)
def test_the_page_describes_every_parameter_of_an_admission_policy(name: str, repository_root: Path) -> None:
    spec = ADMISSION[name]
    assert load_registry().admission_policy(name).package == "vajra-py"
    assert spec.summary.endswith(".")
    assert spec.source
    page = (repository_root / "docs" / "reference" / "policies.md").read_text(encoding="utf-8")
    section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert section, f"no section on {name}"
    assert f"[`{name}`](#{name})" in page
    assert f"(reference/policies.md#{name})" in (repository_root / "docs" / "admission.md").read_text(encoding="utf-8")
    shared = page.partition("\n## Admission policies\n")[2].partition("\n### token_bucket\n")[0]
    for parameter in parameters_of(spec.config):
        assert parameter.description
        row = re.search(rf"^\|[^|]*`{parameter.name}`[^|]*\|([^|]*)\|", section + "\n" + shared, re.MULTILINE)
        assert row, f"{name} has a parameter {parameter.name}, which the page does not mention"
        default = "none" if parameter.default is None else str(parameter.default)
        assert row[1].strip().strip("`") == default, (name, parameter.name)


def test_the_readme_names_every_policy(repository_root: Path) -> None:
    table = (
        (repository_root / "README.md")
        .read_text(encoding="utf-8")
        .partition("\n## Policies\n")[2]
        .partition("\n## ")[0]
    )
    registry = load_registry()
    offers = [*map(registry.policies, Layer), *registry.beside_layers.values()]
    names = {name for kind in offers for name, offer in kind.items() if offer.package == "vajra-py"}
    linked = re.findall(r"\[`(\w+)`\]\(docs/\w+(?:/\w+)?\.md#[\w-]+\)", table)
    assert sorted(linked) == sorted([*names, "priority"]), "`priority` is a prioritizer and a retention policy"
    assert table.count("\n|") <= 24, "fits one screen"
