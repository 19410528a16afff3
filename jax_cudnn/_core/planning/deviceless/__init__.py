"""cuDNN plans for a GPU that is not there: profiles, the null driver and the planning worker."""

from .client import call as call
from .profiles import Profile as Profile
