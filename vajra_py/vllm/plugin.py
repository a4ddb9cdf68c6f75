"""Check the options of a vLLM before it loads its model, and check requests in its front end.

vLLM creates its scheduler last, so a check in the scheduler would fail only after the model is loaded. But vLLM calls
the plug-ins of `vllm.general_plugins` before it reads its options: this plug-in makes vLLM check every configuration
that names this package's scheduler as soon as the configuration is complete.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from typing import Any

from vajra_py.errors import ConfigError, VajraError
from vajra_py.experiment.runs.recording import check_is_free
from vajra_py.plugins import load_registry
from vajra_py.vllm.connecting import check_connector
from vajra_py.vllm.mechanism import check_policies
from vajra_py.vllm.settings import experiment_of, fallback_of, sizes_of, vajra_options_of
from vajra_py.vllm.support import check_options, check_version, installed_version

_MANY_BLOCKS = 1 << 20
"""Number of KV blocks assumed until the model is loaded."""
_SECONDS_TO_RECORD = 60


def check_early() -> None:
    """Install the early checks; vLLM calls this at least once in each of its processes."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if getattr(create, "is_checked_by_vajra", False):
        return

    @functools.wraps(create)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        if not is_own(self.scheduler_cls):
            return create(self, *args, **options)
        try:
            version = check_version(installed_version())
            config = create(self, *args, **options)
            check(config, version)
            grant_time_to_record(config)
        except VajraError as error:
            if _is_command():
                raise SystemExit(str(error)) from None  # hides the traceback of vLLM's start-up
            raise
        return config

    checked.is_checked_by_vajra = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = checked
    _check_requests_early()


def _check_requests_early() -> None:
    """Make vLLM's front end reject a client's malformed `vllm_xargs` like other wrong parameters (HTTP status 400)."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs

    @functools.wraps(process)
    def checked(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        if is_own(self.vllm_config.scheduler_config.scheduler_cls):
            from vajra_py.vllm.extra_args import stated_in

            try:
                stated_in(getattr(params, "extra_args", None) or {})
            except ConfigError as error:
                raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
        return process(self, request_id, prompt, params, *args, **options)

    InputProcessor.process_inputs = checked


def is_own(scheduler_cls: Any) -> bool:
    """Return whether `--scheduler-cls` is this package's scheduler or a subclass."""
    if isinstance(scheduler_cls, str):
        if scheduler_cls.startswith(("vajra_py.vllm.", "vllm.")):  # the prefix decides, without an import
            return scheduler_cls.startswith("vajra_py.vllm.")
        try:
            scheduler_cls = pkgutil.resolve_name(scheduler_cls)
        except Exception:  # vLLM imports the class as well, and reports the error
            return False
    return any(one.__module__.startswith("vajra_py.vllm.") for one in getattr(scheduler_cls, "__mro__", ()))


def check(config: Any, version: tuple[int, int]) -> None:
    """Raise the errors that the scheduler would raise for these options and the experiment file."""
    check_options(config)
    registry = load_registry()
    sizes = sizes_of(config, config.cache_config.block_size or 16, _MANY_BLOCKS, version)
    options = vajra_options_of(config.additional_config)
    experiment = experiment_of(sizes, options, config.scheduler_config, registry)
    fallback_of(experiment, registry)
    check_connector(config)
    check_policies(experiment, registry, sizes.max_model_len)
    if options.save_run is not None:
        check_is_free(options.save_run)


class TimeToRecord(int):
    """Value of `shutdown_timeout` in seconds that replaces 0, so that a recording can be finished."""


def grant_time_to_record(config: Any) -> None:
    """Let the scheduling process finish its recording when vLLM is stopped.

    With a `shutdown_timeout` of 0, the default, vLLM kills its processes immediately. The value 0 also means that
    running requests are aborted at once; `abort_at_once` restores this meaning.
    """
    if config.shutdown_timeout == 0 and vajra_options_of(config.additional_config).save_run is not None:
        config.shutdown_timeout = TimeToRecord(_SECONDS_TO_RECORD)


def abort_at_once(config: Any) -> None:
    """Make the scheduling process abort requests at shutdown if the timeout was set only for the recording."""
    if isinstance(config.shutdown_timeout, TimeToRecord):
        config.shutdown_timeout = 0


def end_before_workers() -> None:
    """Make the scheduling process end the scheduler before the workers: vLLM may kill this process while the workers
    end.
    """
    from vllm.v1.engine.core import EngineCore

    shutdown = EngineCore.shutdown
    if getattr(shutdown, "is_changed_by_vajra", False):
        return

    @functools.wraps(shutdown)
    def ended(self: Any) -> None:
        if is_own(type(self.scheduler)):
            self.scheduler.shutdown()
        shutdown(self)

    ended.is_changed_by_vajra = True  # type: ignore[attr-defined]
    EngineCore.shutdown = ended


def _is_command() -> bool:
    """Return whether this process is one of vLLM's commands, whose output a user reads."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec is not None else ""
    return name.startswith("vllm.") or str(getattr(main, "__file__", "")).rpartition("/")[2] == "vllm"
