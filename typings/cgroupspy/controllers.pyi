from cgroupspy.interfaces import DictFile, DictOrFlagFile, IntegerFile
from cgroupspy.nodes import Node

class Controller:
    node: Node
    def __init__(self, node: Node) -> None: ...

class CpuAcctController(Controller):
    usage: IntegerFile

class MemoryController(Controller):
    failcnt: IntegerFile
    limit_in_bytes: IntegerFile
    usage_in_bytes: IntegerFile
    max_usage_in_bytes: IntegerFile
    stat: DictFile
    oom_control: DictOrFlagFile
