"""A stand-in for cuDNN's graph API that notes what each descriptor is given, and what is executed."""

import ctypes
from itertools import count

from ucudnn.backends.cudnn.api.descriptor import _ARRAY_CODES
from ucudnn.backends.cudnn.api.enums import Attribute, DescriptorType, HeuristicMode, Type
from ucudnn.errors import CudnnError

_TYPES = {"i": ctypes.c_int, "f": ctypes.c_float, "d": ctypes.c_double, "b": ctypes.c_bool, "q": ctypes.c_int64}


class DescribingLibrary:
    """cuDNN with one engine, 7, whose plans need 512 bytes of workspace.

    Args:
        offers: the values of knob 2 of the engine that heuristics offer, by the mode of the heuristics.

    Attributes:
        made: what each descriptor is and was given, by its address: attributes with lists of values.
        references: the attributes whose values are addresses of descriptors.
        executed: the plans and variant packs that were executed.
        handles: the handles on which they were.
        refuses: whether the next execution fails.
        asked: the modes that were asked.
    """

    version_text = "stand-in"

    def __init__(self, offers=None):
        self.made, self.executed, self._addresses = {}, [], count(1000, 8)
        self.offers, self.asked = offers or {}, []
        self.handles, self.refuses = [], False
        self.references = set()

    def call(self, name, *arguments):
        if name == "cudnnBackendGetAttribute":
            return self._read(*arguments)
        return self.check(self.function(name)(*arguments), name)

    def _read(self, address, attribute, kind, size, values):
        """Fill descriptors with what an attribute refers to, and return their number; no engine has a note."""
        if kind is not Type.DESCRIPTOR:
            return 0
        given = self.made[address]
        if attribute == Attribute.ENGINEHEUR_RESULTS:
            (mode,) = given[Attribute.ENGINEHEUR_MODE]
            if not size:
                self.asked.append(HeuristicMode(mode))
            graph = given[Attribute.ENGINEHEUR_OPERATION_GRAPH]
            found = [self._offered(graph, value) for value in self.offers.get(mode, ())]
        else:
            found = [self.made[each] for each in given.get(attribute, ())]
        receivers = (ctypes.c_int64 * size).from_address(values) if size else ()
        for receiver, each in zip(receivers, found, strict=False):
            self.made[receiver].update(each)
        return len(found)

    def _offered(self, graph, value):
        """Return what a heuristic gives a configuration of the engine."""
        engine, knob = next(self._addresses), next(self._addresses)
        self.made[engine] = {Attribute.ENGINE_GLOBAL_INDEX: [7], Attribute.ENGINE_OPERATION_GRAPH: graph}
        self.made[knob] = {Attribute.KNOB_CHOICE_KNOB_TYPE: [2], Attribute.KNOB_CHOICE_KNOB_VALUE: [value]}
        return {Attribute.ENGINECFG_ENGINE: [engine], Attribute.ENGINECFG_KNOB_CHOICES: [knob]}

    def check(self, status, name):
        if status:
            raise self.error(status, name)

    def error(self, status, name):
        return CudnnError(status, f"{status} from {name}")

    def function(self, name):
        return getattr(self, name)

    def cudnnBackendCreateDescriptor(self, kind, made):  # noqa: N802 (cuDNN's name)
        address = next(self._addresses)
        self.made[address] = {"kind": DescriptorType(kind)}
        ctypes.c_int64.from_address(made).value = address
        return 0

    def cudnnBackendSetAttribute(self, address, attribute, kind, size, values):  # noqa: N802 (cuDNN's name)
        code = _TYPES[_ARRAY_CODES.get(Type(kind), "q")]
        self.made[address][int(attribute)] = list((code * size).from_address(values))
        if kind == Type.DESCRIPTOR:
            self.references.add(int(attribute))
        return 0

    def cudnnBackendGetAttribute(self, address, attribute, kind, size, _, values):  # noqa: N802
        sizes = (Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, Attribute.ENGINECFG_WORKSPACE_SIZE)
        found = 512 if attribute in sizes else self.made[address][attribute][0]
        ctypes.c_int64.from_address(values).value = found
        return 0

    def cudnnBackendFinalize(self, address):  # noqa: N802
        given = self.made[address]
        return 3000 if given.get(Attribute.ENGINE_GLOBAL_INDEX, [7]) != [7] else 0

    def cudnnBackendExecute(self, handle, plan, pack):  # noqa: N802
        if self.refuses:
            self.refuses = False
            return 2000
        self.executed.append((plan, pack))
        self.handles.append(handle)
        return 0

    def cudnnBackendDestroyDescriptor(self, address):  # noqa: N802
        return 0

    def of(self, address, attribute):
        """Return what the descriptors were given to which an attribute of a descriptor refers."""
        return [self.made[each] for each in self.made[address][attribute]]

    def contents(self, address):
        """Return what a descriptor was given, with the contents of the descriptors that it refers to."""
        return {
            name: [self.contents(each) for each in values] if name in self.references else values
            for name, values in self.made[address].items()
        }

    def graph(self, plan):
        """Return what the operations of a plan's graph were given, in order."""
        (configuration,) = self.of(plan, Attribute.EXECUTION_PLAN_ENGINE_CONFIG)
        (engine,) = (self.made[each] for each in configuration[Attribute.ENGINECFG_ENGINE])
        (graph,) = (self.made[each] for each in engine[Attribute.ENGINE_OPERATION_GRAPH])
        return [self.made[each] for each in graph[Attribute.OPERATIONGRAPH_OPS]]
