//! What LiteLLM's generic callback sends: its `StandardLoggingPayload`, one, an array of them, or one on each line.
//!
//! Its shape was taken from LiteLLM 1.106 itself (`tests/fixtures/litellm`). Of its fifty fields those are read that say which
//! call, whose, how much and when; everything else may come and go.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::notice::{MAX_AMOUNT, MAX_TOKENS};
use super::{Notice, Source};
use crate::budget::{Nanodollars, Tokens};

/// What became of the items of one body.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ingested {
    /// Calls that have a receipt now, and had none.
    pub new: u64,
    /// Said before.
    pub known: u64,
    /// Calls of ours that are not in the books yet; they get their receipts when they are.
    pub unknown: u64,
    /// Other than said before; kept and flagged, not charged.
    pub conflicting: u64,
    /// Failed attempts at no cost of calls that used tokens; kept, and the calls still have no receipts.
    pub unpaid: u64,
    /// Calls that others have made with the same LiteLLM, other gateways among them; nothing is kept of them.
    pub foreign: u64,
    /// Items that cannot be used.
    pub invalid: u64,
    /// Why, for the first of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub complaints: Vec<Complaint>,
}

/// Why an item cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Complaint {
    /// Which of the body's items, counted from 0.
    pub item: usize,
    pub message: String,
}

/// The items of one body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    pub notices: Vec<Notice>,
    pub foreign: u64,
    pub invalid: u64,
    pub complaints: Vec<Complaint>,
}

/// A body that has no items at all.
#[derive(Debug, thiserror::Error)]
#[error(
    "the body is neither a JSON object, nor an array of objects, nor one object on each line: {0}"
)]
pub struct Malformed(#[from] serde_json::Error);

/// Reads a body. An item that cannot be used takes nothing away from the others.
///
/// # Errors
/// The body is not JSON.
pub fn parse(body: &[u8]) -> Result<Parsed, Malformed> {
    let mut parsed = Parsed::default();
    let mut count = 0;
    for values in serde_json::Deserializer::from_slice(body).into_iter::<Value>() {
        let items = match values? {
            Value::Array(items) => items,
            one => vec![one],
        };
        for item in items {
            parsed.add(count, &item);
            count += 1;
        }
    }
    Ok(parsed)
}

impl Parsed {
    fn add(&mut self, item: usize, value: &Value) {
        match notice(value) {
            Ok(notice) if notice.run.is_some() => self.notices.push(notice),
            Ok(_) => self.foreign += 1,
            Err(message) => {
                self.invalid += 1;
                if self.complaints.len() < MAX_COMPLAINTS {
                    self.complaints.push(Complaint { item, message });
                }
            }
        }
    }
}

/// The fields that are read. What LiteLLM does not know is null.
#[derive(Deserialize)]
struct Payload {
    litellm_call_id: Option<String>,
    status: Option<String>,
    response_cost: Option<Nanodollars>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    #[serde(rename = "startTime")]
    started: Option<f64>,
    #[serde(rename = "endTime")]
    ended: Option<f64>,
    end_user: Option<String>,
    /// As the caller named it; `model` is what the provider calls it.
    model_group: Option<String>,
    model: Option<String>,
    metadata: Option<Metadata>,
}

/// The metadata of a call, wherever LiteLLM shows it.
#[derive(Deserialize)]
pub(super) struct Metadata {
    spend_logs_metadata: Option<Ours>,
}

/// What the gateway tells LiteLLM with each call; others may tell it anything.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ours {
    Run {
        run_id: String,
        #[serde(rename = "cogni_deployment_id")]
        deployment: Option<String>,
    },
    Other(serde::de::IgnoredAny),
}

impl Metadata {
    /// The run, and the deployment.
    pub(super) fn whose(self) -> (Option<String>, Option<String>) {
        match self.spend_logs_metadata {
            Some(Ours::Run { run_id, deployment }) => (Some(run_id), deployment),
            Some(Ours::Other(_)) | None => (None, None),
        }
    }
}

fn notice(value: &Value) -> Result<Notice, String> {
    let payload = Payload::deserialize(value).map_err(|error| error.to_string())?;
    let call_id = payload.litellm_call_id.filter(|id| !id.is_empty());
    let call_id =
        call_id.ok_or("`litellm_call_id` is missing, so nobody can tell which call this is")?;
    let is_failure = match payload.status.as_deref() {
        Some("success") => false,
        Some("failure") => true,
        _ => return Err("`status` is neither \"success\" nor \"failure\"".to_owned()),
    };
    let ended = payload.ended.and_then(time).ok_or("`endTime` is not a time in seconds")?;
    let (run, deployment) = payload.metadata.map(Metadata::whose).unwrap_or_default();
    Notice {
        call_id,
        source: Source::LitellmCallback,
        run,
        deployment,
        account: payload.end_user,
        model: payload.model_group.filter(|name| !name.is_empty()).or(payload.model),
        is_failure,
        amount: payload.response_cost.unwrap_or_default(),
        input: Tokens(payload.prompt_tokens.unwrap_or_default()),
        output: Tokens(payload.completion_tokens.unwrap_or_default()),
        started: payload.started.and_then(time).unwrap_or(ended),
        ended,
    }
    .checked()
}

impl Notice {
    /// # Errors
    /// Which figure cannot be one call's.
    pub(super) fn checked(self) -> Result<Self, String> {
        if self.call_id.len() > MAX_ID {
            return Err(format!("the call's id is longer than {MAX_ID} bytes"));
        }
        if self.run.as_ref().is_some_and(|run| run.len() > MAX_ID) {
            return Err(format!("`run_id` is longer than {MAX_ID} bytes"));
        }
        if self.amount > MAX_AMOUNT {
            return Err(format!("${} is not the price of one call", self.amount));
        }
        if self.input.max(self.output) > MAX_TOKENS {
            return Err("so many tokens are not those of one call".to_owned());
        }
        Ok(self)
    }
}

fn time(seconds: f64) -> Option<SystemTime> {
    let since = Duration::try_from_secs_f64(seconds).ok()?;
    // Of what is beyond, no date can be written.
    (since < LATEST).then(|| SystemTime::UNIX_EPOCH + since)
}

const MAX_COMPLAINTS: usize = 10;

/// LiteLLM takes an id of 256 bytes from its caller; ours have 36.
const MAX_ID: usize = 256;

/// The year 9999.
const LATEST: Duration = Duration::from_hours(70_380_768);
