"""Plans whose storages move and slide at random before their actions."""

import random
from dataclasses import replace

from ucudnn.memory.allocator.step_replay import StepReplay, replayed_step
from ucudnn.memory.plans.actions import ActionKind, Move
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase, Role


class _Nowhere:
    """A space of which nobody asks addresses."""

    def take(self, size):
        return 0, size

    def give_back(self, piece):
        pass


class _Shaker(StepReplay):
    """Lets some of the storages that are there move before each action."""

    def __init__(self, plan, costs, seed):
        super().__init__(plan.graph, _Nowhere(), state_exists=True)
        self.graph = plan.graph
        self.dice, self.found = random.Random(seed), {}
        actions = enumerate(plan.actions)
        runs = [index for index, (kind, target) in actions if kind is ActionKind.RUN and self.is_inside(target)]
        self.last = max(runs)
        self.step(replayed_step(plan, costs, simulate(plan, costs).delayed).events)

    def is_inside(self, operation):
        return self.graph.operations[operation].phase is not Phase.OPTIMIZER

    def take(self, event, wanted):
        roles = (Role.ACTIVATION, Role.GRADIENT)
        there = [each for each in self.pieces if self.graph.storages[each].role in roles]
        moving = tuple(self.dice.sample(there, min(len(there), self.dice.randint(0, 3))))
        if moving and event.action <= self.last:
            pads = self.dice.randint(1, 999), self.dice.randint(1, 999)
            filling = Move(pads, (), opens=(self.dice.randint(0, 1),))  # while the action takes memory
            self.found[event.action] = (Move(pads[:1], moving, slides=self.dice.random() < 0.5), filling)
        super().take(event, wanted)


def shaken(plan, costs, seed):
    """Return a plan before whose actions random storages move."""
    moves = _Shaker(plan, costs, seed).found
    counts = {slides: _count(moves, slides) for slides in (False, True)}
    assert sum(counts.values()) > 20
    assert min(counts.values()) > 5
    return replace(plan, moves=moves)


def _count(moves, slides):
    return sum(len(each.storages) for several in moves.values() for each in several if each.slides is slides)
