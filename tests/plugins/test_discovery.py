from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from vajra_py.contract import Layer
from vajra_py.errors import PluginError, UnknownNameError

PRIORITIZER = Layer.REQUEST_PRIORITIZER
HEADER = """\
from vajra_py.contract import *
from vajra_py.contract.hookspecs import LatencyModelSpec, ObserverSpec, OutputLengthSpec, Preset
from pydantic import BaseModel
class Config(PolicyConfig): pass
"""


def test_a_package_offers_its_policies_under_name_and_alias(site: Any, policy_source: Callable[..., str]) -> None:
    site.install("lab-policies", policy_source("slowest_first", ("slow",)), version="2.3")
    registry = site.registry()
    offer = registry.policy(PRIORITIZER, "slow")
    assert (offer.spec.name, offer.package, offer.version) == ("slowest_first", "lab-policies", "2.3")
    assert list(registry.policies(PRIORITIZER)) == ["slowest_first"]
    assert registry.policy_names(PRIORITIZER) == ("slow", "slowest_first")
    assert registry.find_policies("slow") == (offer,)
    assert not registry.policies(Layer.REPLICA_SCHEDULER)


LATE = (
    HEADER
    + "@hookimpl\ndef vajra_policies(): return [PolicyAt('late', Layer.REQUEST_PRIORITIZER, {place!r}, {aliases})]"
)


def test_a_policy_given_by_its_place_is_imported_when_it_is_used(site: Any) -> None:
    policy = 'LATE = PolicySpec("late", Layer.REQUEST_PRIORITIZER, Config, print, "Late.", aliases=("tardy",))'
    (site.folder / "late_home.py").write_text(HEADER + policy)
    site.install("lab-policies", LATE.format(place="late_home:LATE", aliases=("tardy",)))
    registry = site.registry()
    assert registry.policy_names(PRIORITIZER) == ("late", "tardy")
    assert list(registry.policies(PRIORITIZER)) == ["late"]
    assert "late_home" not in sys.modules
    offer = registry.policy(PRIORITIZER, "tardy")
    assert (offer.spec.summary, offer.package) == ("Late.", "lab-policies")
    assert registry.policy(PRIORITIZER, "late") is offer


@pytest.mark.parametrize(
    ("place", "source", "complaint"),
    [
        ("no_such_home", "", r"'late', but 'no_such_home' raised ModuleNotFoundError"),
        ("late_home", "", r"'late', but 'late_home' raised AttributeError"),
        ("late_home", "SPEC = 3", r"offers 3 as a policy; expected a PolicySpec"),
        (
            "late_home",
            'SPEC = PolicySpec("later", Layer.REQUEST_PRIORITIZER, Config, print, "Late.")',
            r"'late'.*as name, layer and aliases of a policy; 'late_home' says.*'later'",
        ),
    ],
)
def test_a_place_without_its_policy_is_named_with_its_package(
    site: Any, place: str, source: str, complaint: str
) -> None:
    (site.folder / "late_home.py").write_text(HEADER + source)
    site.install("lab-policies", LATE.format(place=place, aliases=()), version="2.3")
    registry = site.registry()
    with pytest.raises(PluginError, match=rf"lab-policies 2\.3.*{complaint}"):
        registry.policy(PRIORITIZER, "late")


def test_a_name_given_by_its_place_clashes_like_any(site: Any, policy_source: Callable[..., str]) -> None:
    site.install("lab-policies", LATE.format(place="nowhere", aliases=()))
    site.install("other", policy_source("late"))
    with pytest.raises(PluginError, match=r"named 'late', and so does plug-in"):
        site.registry()


def test_an_unknown_name_gets_the_nearest_and_all_names(site: Any, policy_source: Callable[..., str]) -> None:
    site.install("lab-policies", policy_source("slowest_first"))
    site.install("other", policy_source("edf"))
    registry = site.registry()
    for ask in (lambda name: registry.policy(PRIORITIZER, name), registry.find_policies):
        with pytest.raises(
            UnknownNameError, match=r"'slowest-frist'.*Did you mean 'slowest_first'\? Allowed: edf, slow"
        ):
            ask("slowest-frist")
    with pytest.raises(UnknownNameError, match="preset"):
        registry.preset("vllm-v1")
    with pytest.raises(UnknownNameError, match="observer"):
        registry.observer("x")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import no_such_module_anywhere", r"cannot be imported.*ModuleNotFoundError.*no_such_module_anywhere"),
        ("raise SystemExit('stop')", r"cannot be imported.*SystemExit \(stop\)"),
        ("def f(:", r"cannot be imported.*SyntaxError"),
        ("x = 1", r"implements no hook.*vajra_policies"),
        ("def vajra_policies(): return []", r"'vajra_policies' without the decorator @hookimpl"),
        (
            HEADER + "@hookimpl\ndef vajra_polices(): return []",
            r"unknown hook 'vajra_polices'.*Did you mean 'vajra_policies'",
        ),
        (HEADER + "@hookimpl\ndef vajra_policies(registry): return []", r"as specified.*registry"),
        (HEADER + "@hookimpl\ndef vajra_policies(): return 3", r"vajra_policies returned 3; expected a list"),
        (HEADER + "@hookimpl\ndef vajra_policies(): return None", r"returned None; expected a list"),
        (HEADER + "@hookimpl\ndef vajra_policies(): return 'lrs'", r"returned 'lrs'; expected a list"),
        (
            HEADER + "@hookimpl\ndef vajra_policies(): return [Config]",
            r"offers .*Config.* as a policy; expected a PolicySpec",
        ),
        (HEADER + "@hookimpl\ndef vajra_policies(): yield 1 / 0", r"vajra_policies raised ZeroDivisionError"),
        (HEADER + "@hookimpl\ndef vajra_presets(): return [1]", r"offers 1 as a preset; expected a Preset"),
    ],
)
def test_a_broken_plugin_is_named_with_its_version(site: Any, source: str, complaint: str) -> None:
    site.install("broken-lab", source, version="0.7")
    with pytest.raises(PluginError, match=complaint) as caught:
        site.registry()
    assert "'broken_lab' of broken-lab 0.7" in str(caught.value)
    assert caught.value.exit_code == 2


SPEC = "PolicySpec('p', Layer.REQUEST_PRIORITIZER, Config, lambda c, x: None, 'A policy.')"


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (SPEC.replace("'p'", "'P P'"), "named 'P P'; a name is made of lower-case letters"),
        (SPEC.replace("'A policy.'", "' '"), "without a summary"),
        (
            SPEC.replace("Layer.REQUEST_PRIORITIZER", "'prio'"),
            "in layer 'prio'; expected one of Layer.REQUEST_PRIORITIZER",
        ),
        (SPEC.replace("Config", "dict", 1), "expected a pydantic model class"),
        (SPEC.replace("Config", "Loose", 1), "which is not a PolicyConfig"),
        (SPEC.replace("Config", "Open", 1), "do not forbid unknown names"),
        (SPEC.replace("lambda c, x: None", "None"), "with build None; expected a callable"),
        (SPEC[:-1] + ", aliases='lars')", "aliases 'lars'; expected a tuple of names"),
        (SPEC[:-1] + ", aliases=('L S',))", "expected a tuple of names"),
    ],
)
def test_a_malformed_spec_is_refused(site: Any, spec: str, complaint: str) -> None:
    models = (
        "class Loose(BaseModel):\n    model_config = {'extra': 'forbid'}\n"
        "class Open(PolicyConfig):\n    model_config = {'extra': 'ignore'}\n"
    )
    site.install("lab", f"{HEADER}{models}@hookimpl\ndef vajra_policies(): return [{spec}]\n")
    with pytest.raises(PluginError, match=complaint):
        site.registry()


@pytest.mark.parametrize(
    ("first", "second"),
    [(("lrs", ()), ("lrs", ())), (("lrs", ("lars",)), ("lars", ())), (("a", ("same",)), ("b", ("same",)))],
    ids=["names", "alias and name", "aliases"],
)
def test_two_packages_with_one_name_are_both_blamed(
    site: Any, policy_source: Callable[..., str], first: Any, second: Any
) -> None:
    site.install("alpha", policy_source(*first), version="1.1")
    site.install("beta", policy_source(*second), version="2.2")
    with pytest.raises(PluginError) as caught:
        site.registry()
    message = str(caught.value)
    assert "'alpha' of alpha 1.1" in message
    assert "'beta' of beta 2.2" in message
    assert "VAJRA_DISABLE_PLUGINS" in message
    assert list(site.registry("beta").policies(PRIORITIZER)) == [first[0]]


def test_one_name_in_two_layers_is_no_clash(site: Any) -> None:
    specs = f"[{SPEC}, {SPEC.replace('REQUEST_PRIORITIZER', 'REPLICA_SCHEDULER')}]"
    site.install("lab", f"{HEADER}@hookimpl\ndef vajra_policies(): return {specs}\n")
    assert [offer.spec.layer for offer in site.registry().find_policies("p")] == [PRIORITIZER, Layer.REPLICA_SCHEDULER]


def test_two_entry_points_of_one_name_are_both_loaded(site: Any, policy_source: Callable[..., str]) -> None:
    site.install("alpha", policy_source("a"), entry="[vajra]\nmine = alpha\n")
    site.install("beta", policy_source("b"), entry="[vajra]\nmine = beta\n")
    registry = site.registry()
    assert list(registry.policies(PRIORITIZER)) == ["a", "b"]
    assert [each.package for each in registry.plugins] == ["alpha", "beta"]


def test_one_module_behind_two_packages_is_an_error(site: Any, policy_source: Callable[..., str]) -> None:
    site.install("alpha", policy_source("a"))
    site.install("beta", "", entry="[vajra]\nbeta = alpha\n")
    with pytest.raises(PluginError, match=r"'beta' of beta 1\.0"):
        site.registry()


@pytest.mark.parametrize("name", ["broken_lab", "broken-lab", "Broken-Lab", " broken_lab ,"])
def test_a_plugin_can_be_left_out_by_entry_point_or_package(
    site: Any, policy_source: Callable[..., str], name: str
) -> None:
    site.install("Broken-Lab", "raise RuntimeError", entry="[vajra]\nbroken_lab = Broken_Lab\n")
    site.install("fine", policy_source("a"))
    assert [each.package for each in site.registry(name).plugins] == ["fine"]


def test_leaving_out_what_is_not_there_is_an_error(site: Any, policy_source: Callable[..., str]) -> None:
    site.install("fine", policy_source("a"))
    with pytest.raises(PluginError, match=r"'fin'.*VAJRA_DISABLE_PLUGINS.*Did you mean 'fine'"):
        site.registry("fin")


def test_models_and_observers_come_from_plugins_too(site: Any) -> None:
    site.install(
        "lab",
        HEADER
        + "class P(BaseModel):\n    model_config = {'extra': 'forbid'}\n"
        + "@hookimpl\ndef vajra_latency_models(): return [LatencyModelSpec('lab_table', P, lambda c: None, 'A table.')]\n"
        + "@hookimpl\ndef vajra_observers(): return [ObserverSpec('lab_log', P, lambda c: Observer(), 'A log.')]\n"
        + "@hookimpl\ndef vajra_output_length_predictors():\n"
        + "    return [OutputLengthSpec('lab_guess', P, lambda c, s, t: None, 'A guess.')]\n",
    )
    registry = site.registry()
    assert registry.latency_model("lab_table").package == "lab"
    assert registry.output_length("lab_guess").package == "lab"
    assert registry.observer("lab_log").package == "lab"
    assert registry.latency_model("roofline").package == "vajra-py"
    assert registry.output_length("none").package == "vajra-py"


def test_a_plugin_may_not_replace_a_builtin_model(site: Any) -> None:
    site.install(
        "lab",
        HEADER
        + "class P(BaseModel):\n    model_config = {'extra': 'forbid'}\n"
        + "@hookimpl\ndef vajra_latency_models(): return [LatencyModelSpec('roofline', P, lambda c: None, 'Mine.')]\n",
    )
    with pytest.raises(PluginError, match=r"latency model named 'roofline', and so does plug-in .*vajra-py"):
        _ = site.registry().latency_models


PROGRAM = """
import sys
from vajra_py.contract import Layer
from vajra_py.errors import VajraError
from vajra_py.plugins import load_registry
try:
    registry = load_registry()
    assert load_registry() is registry
    print(",".join(name for layer in Layer for name in registry.policies(layer)))
    print(sorted({"numpy", "torch", "vajra_py.latency", "ruamel", "jinja2", "vajra_py.workload"} & set(sys.modules)))
except VajraError as error:
    print(error)
"""


def run_program(folder: object, disabled: str) -> str:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "VAJRA_DISABLE_PLUGINS": disabled}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_installed_packages_are_found_and_listing_them_imports_nothing_heavy(
    site: Any, policy_source: Callable[..., str]
) -> None:
    site.install("lab-policies", policy_source("slowest_first"))
    names, heavy = run_program(site.folder, "").splitlines()
    assert "slowest_first" in names.split(",")
    assert heavy == "[]"
    assert "slowest_first" not in run_program(site.folder, "lab-policies").splitlines()[0]
    assert "Did you mean 'lab_policies'" in run_program(site.folder, "lab-polices")
