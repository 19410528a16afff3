"""cuDNN's fused kernels for JAX: attention, convolutions, matmuls and normalizations."""

from typing import TYPE_CHECKING as TYPE_CHECKING

from . import ops as ops
from ._core.errors import GraphAttributeError as GraphAttributeError
from ._core.errors import GraphError as GraphError
from ._core.errors import GraphTypeError as GraphTypeError
from ._core.errors import JaxCudnnError as JaxCudnnError
from ._core.errors import JobError as JobError
from ._core.errors import LibraryError as LibraryError
from ._core.errors import PlanningError as PlanningError
from ._core.errors import PlanningWorkerError as PlanningWorkerError
from ._core.errors import TargetError as TargetError
from ._core.errors import UnsupportedGraphError as UnsupportedGraphError
from ._core.graph.options import Options as Options
from ._core.graph.trace import GraphFunction as GraphFunction
from ._core.graph.trace import graph as graph
from ._core.lazy import __dir__ as __dir__
from ._core.lazy import __getattr__ as __getattr__
from ._core.primitive import save_cudnn as save_cudnn
from ._core.user_context import implementation as implementation

if TYPE_CHECKING:  # see _core/lazy.py
    from . import flax as flax
    from ._core.candidates import Candidates as Candidates
    from ._core.context import target as target
    from ._core.inspection.bisect import bisect as bisect
    from ._core.planning.build import Candidate as Candidate
    from ._core.planning.deviceless.profiles import Profile as Profile
    from ._core.planning.execution_plan import ExecutionPlan as ExecutionPlan
    from ._core.planning.planned_graph import PlannedSegment as PlannedSegment
    from ._core.plans.explain import Report as Report
    from ._core.plans.explain import explain as explain
    from ._core.plans.picture import Picture as Picture
    from ._core.plans.plan import Explanation as Explanation
    from ._core.plans.plan import Plan as Plan
    from ._core.plans.plans import plan as plan
    from ._core.plans.plans import plans as plans
    from ._core.plans.plans import warmup as warmup
    from ._core.plans.support import Support as Support
    from ._core.plans.support import support as support
    from ._core.plans.tune import tune as tune
    from ._core.settings import configure as configure
    from .acceleration.api import accelerate as accelerate
    from .interop import Graph as Graph
    from .interop import from_pygraph as from_pygraph
    from .interop import graph_cache as graph_cache
