from vajra_py.api import CapacityAnswer as CapacityAnswer
from vajra_py.api import Comparison as Comparison
from vajra_py.api import ExperimentConfig as ExperimentConfig
from vajra_py.api import RunData as RunData
from vajra_py.api import SweepResult as SweepResult
from vajra_py.api import capacity as capacity
from vajra_py.api import compare as compare
from vajra_py.api import figures as figures
from vajra_py.api import load as load
from vajra_py.api import load_workload as load_workload
from vajra_py.api import open_runs as open_runs
from vajra_py.api import plots as plots
from vajra_py.api import report as report
from vajra_py.api import run as run
from vajra_py.api import sweep as sweep
from vajra_py.api import validate_measured as validate_measured
from vajra_py.contract import *  # noqa: F403
from vajra_py.engine import LLM as LLM
from vajra_py.engine import AsyncLLM as AsyncLLM
from vajra_py.engine import SamplingParams as SamplingParams

__version__: str
