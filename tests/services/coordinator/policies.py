"""What an operator decides who sets nothing."""

from tokenloom.services.coordinator.engines.defaults import PD_THRESHOLD, PLACEMENT
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.runtime.placement.rules import RULES

DEFAULT_POLICY = Policy(PD_THRESHOLD, RULES[PLACEMENT])
