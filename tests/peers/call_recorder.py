"""A LiteLLM callback that records everything LiteLLM saw of each call, as a line of JSON in the file $CALL_RECORDS."""

import json
import os
import threading

from litellm.integrations.custom_logger import CustomLogger


class CallRecorder(CustomLogger):
    def __init__(self):
        super().__init__()
        self.file = open(os.environ["CALL_RECORDS"], "a")
        self.lock = threading.Lock()

    async def async_pre_call_hook(self, user_api_key_dict, cache, data, call_type):
        self.write("received", data.get("litellm_call_id"), {"data": data, "key": user_api_key_dict, "type": call_type})
        return data

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        self.write("succeeded", kwargs.get("litellm_call_id"), kwargs)

    async def async_log_failure_event(self, kwargs, response_obj, start_time, end_time):
        self.write("failed", kwargs.get("litellm_call_id"), kwargs)

    def write(self, event, call, seen):
        line = json.dumps({"event": event, "call": call, "seen": plain(seen)})
        with self.lock:
            self.file.write(f"{line}\n")
            self.file.flush()


def plain(value, depth=12):
    """Converts a value to JSON. Circular references of LiteLLM's objects are cut off."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth == 0:
        return "…"
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {str(key): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item, depth - 1) for item in value]
    return str(value)


call_recorder = CallRecorder()
