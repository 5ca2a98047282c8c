//! The records of LiteLLM's callback, and their comparison.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::matrix_case::MatrixCase;
use crate::peers::parse_lines;
use crate::peers::setup::{KEY, LitellmProxy};
use crate::support::process::wait_until;

/// LiteLLM's records of each call, by call id: at its arrival and after its success.
pub(super) struct CallbackRecords {
    received: HashMap<String, Value>,
    succeeded: HashMap<String, Value>,
}

impl CallbackRecords {
    /// Waits for the records of this many calls, for at most three minutes.
    pub(super) fn of(litellm: &LitellmProxy, calls: usize) -> Self {
        let begun = Instant::now();
        let told = || litellm.callback_lines().matches(r#"{"event": "succeeded""#).count() >= calls;
        wait_until(|| told() || begun.elapsed() > Duration::from_mins(3), String::new);
        let mut records = Self { received: HashMap::new(), succeeded: HashMap::new() };
        for line in parse_lines(&litellm.callback_lines()) {
            let (events, seen) = match line["event"].as_str().unwrap() {
                "received" => (&mut records.received, &line["seen"]["data"]),
                "succeeded" => (&mut records.succeeded, &line["seen"]["standard_logging_object"]),
                _ => continue,
            };
            events.insert(line["call"].as_str().unwrap_or_default().to_owned(), seen.clone());
        }
        records
    }

    /// G4: The credential, the account, the run and the call id are the gateway's.
    pub(super) fn knows_the_truth(&self, call: &str) {
        let headers = &self.received[call]["secret_fields"]["raw_headers"];
        assert_eq!(headers["authorization"], format!("Bearer {KEY}"));
        assert_eq!(headers["x-litellm-call-id"], call);
        let logged = &self.succeeded[call];
        assert_eq!(logged["litellm_call_id"], call);
        assert_eq!(logged["end_user"], "acct-42");
        let run = json!({ "attempt": 0, "graph_id": "sandbox:agent", "run_id": "run-7" });
        assert_eq!(logged["metadata"]["spend_logs_metadata"], run);
        let us = concat!("User-Agent: cogni-gateway/", env!("CARGO_PKG_VERSION"));
        assert_eq!(logged["request_tags"], json!(["User-Agent: cogni-gateway", us]));
    }

    /// Returns how the record of a spoofed call differs from the records of two honest calls on its route.
    pub(super) fn difference(
        &self,
        honest: [&str; 2],
        lied: Option<&str>,
        cell: &MatrixCase,
    ) -> Option<String> {
        let Some(lied) = lied else { return Some(format!("{cell}: the answer has no call id")) };
        let (Some(received), Some(succeeded)) = (self.received.get(lied), self.succeeded.get(lied))
        else {
            return Some(format!("{cell}: LiteLLM's callback was not told of it"));
        };
        let [one, other] = honest.map(|call| &self.received[call]);
        let mut found = compare_values(one, received);
        for place in compare_values(one, other).keys() {
            found.remove(place);
        }
        let [one, other] = honest.map(|call| &self.succeeded[call]);
        for name in LOGGED.into_iter().filter(|name| one[name] == other[name]) {
            if one[name] != succeeded[name] {
                found.insert(format!("logged {name}"), succeeded[name].clone());
            }
        }
        found.retain(|place, value| {
            let name = place.rsplit('/').next().unwrap_or_default();
            // The client's value is overwritten, unless the field is removed.
            let is_overwritten = cell.members.get(name).is_some_and(|said| said != value);
            // Python prints an object as its address; two honest calls may have the same address by chance.
            let is_address = value.as_str().is_some_and(|text| text.contains(" object at 0x"));
            !is_overwritten && !is_address && !VOLATILE.contains(&name)
        });
        (!found.is_empty()).then(|| format!("{cell}: {}", json!(found)))
    }
}

/// Returns the paths where two values differ, and the second value there.
fn compare_values(first: &Value, second: &Value) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    let mut open = vec![(String::new(), first, second)];
    while let Some((place, first, second)) = open.pop() {
        match (first, second) {
            (Value::Object(one), Value::Object(other)) => {
                let new = other.keys().filter(|key| !one.contains_key(*key));
                for key in one.keys().chain(new) {
                    open.push((format!("{place}/{key}"), &first[key], &second[key]));
                }
            }
            (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
                let pairs = one.iter().zip(other).enumerate();
                open.extend(pairs.map(|(at, (one, other))| (format!("{place}/{at}"), one, other)));
            }
            _ if first != second => {
                found.insert(place, second.clone());
            }
            _ => {}
        }
    }
    found
}

/// The fields by which LiteLLM bills and records.
const LOGGED: [&str; 12] = [
    "api_base",
    "call_type",
    "custom_llm_provider",
    "end_user",
    "model",
    "model_group",
    "model_id",
    "request_tags",
    "requester_ip_address",
    "response_cost",
    "session_id",
    "user_agent",
];

/// Fields that may differ between honest calls, although two given calls may agree.
const VOLATILE: [&str; 2] = ["content-length", "last_refreshed_at"];
