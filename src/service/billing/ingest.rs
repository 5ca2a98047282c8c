//! Reads the bodies of LiteLLM's generic callback: one `StandardLoggingPayload`, an array of payloads, or one payload
//! on each line.
//!
//! The shape was taken from LiteLLM 1.106 itself (`tests/fixtures/litellm`). Of the fifty fields, the parser reads
//! those that name the call, its owner, its cost and its time. LiteLLM may add or remove all other fields.
//!
//! **Invariant:** reading a body takes memory for some hundred items at a time, however many items the body has and
//! whatever they are.

use std::fmt;
use std::mem;
use std::time::{Duration, SystemTime};

use serde::de::{Deserializer as _, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Deserializer, Error};

use super::notice::MAX_AMOUNT;
use super::{ChargeNotice, ChargeSource};
use crate::llm::budget::{Nanodollars, Tokens};
use crate::llm::response::MAX_REPORTED_TOKENS;

/// The outcome of ingesting one body.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IngestReport {
    /// Items that gave a call its receipt.
    pub new: u64,
    /// Items that repeat an earlier notice.
    pub known: u64,
    /// Items of our calls that are not in the billing store yet. These calls get their receipts when they are recorded.
    pub unknown: u64,
    /// Items that contradict an earlier notice. They are stored and flagged, not charged.
    pub conflicting: u64,
    /// Failed attempts at no cost and notices without a price, of calls that used tokens. The items are stored, and the
    /// calls still have no receipts.
    pub unpaid: u64,
    /// Items of other callers of the same LiteLLM, other gateways included. None of them is stored.
    pub foreign: u64,
    /// Items that cannot be parsed.
    pub invalid: u64,
    /// The reasons for the first invalid items.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub complaints: Vec<IngestItemError>,
}

/// The reason for which an item cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IngestItemError {
    /// The index of the item in the body, counted from 0.
    pub item: usize,
    pub message: String,
}

/// The counts of the items of one body that are not notices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SkippedItems {
    pub foreign: u64,
    pub invalid: u64,
    pub complaints: Vec<IngestItemError>,
}

/// An error for a body that is not valid JSON.
#[derive(Debug, thiserror::Error)]
#[error(
    "the body is neither a JSON object, nor an array of objects, nor one object on each line: {0}"
)]
pub struct MalformedBodyError(#[from] Error);

/// Reads a body and passes its notices to `take` in batches. An invalid item does not affect the other items.
///
/// # Errors
/// Returns an error if the body is not JSON; then `take` was never called.
pub fn parse_body(
    body: &[u8],
    mut take: impl FnMut(Vec<ChargeNotice>),
) -> Result<SkippedItems, MalformedBodyError> {
    // The first pass only checks the syntax of the whole body, so that nothing is written for a body that is damaged at
    // its end.
    for_each_item(body, |_| ())?;
    let (mut rest, mut notices, mut count) = (SkippedItems::default(), vec![], 0);
    for_each_item(body, |item| {
        match parse_notice(item) {
            Ok(notice) if notice.run.is_some() => notices.push(notice),
            Ok(_) => rest.foreign += 1,
            Err(message) => rest.add_error(count, &message),
        }
        count += 1;
        if notices.len() == BATCH_SIZE {
            take(mem::take(&mut notices));
        }
    })?;
    if !notices.is_empty() {
        take(notices);
    }
    Ok(rest)
}

/// Calls `each` with each item of a body as raw text. A value that is not an array is one item.
fn for_each_item(body: &[u8], mut each: impl FnMut(&RawValue)) -> Result<(), Error> {
    for value in Deserializer::from_slice(body).into_iter::<&RawValue>() {
        let value = value?;
        // The elements are visited one by one, so that an array is never held as a whole.
        if value.get().starts_with('[') {
            Deserializer::from_str(value.get()).deserialize_seq(ArrayItemVisitor(&mut each))?;
        } else {
            each(value);
        }
    }
    Ok(())
}

/// A visitor that passes on the elements of an array one by one.
struct ArrayItemVisitor<F>(F);

impl<'de, F: FnMut(&RawValue)> Visitor<'de> for ArrayItemVisitor<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        while let Some(item) = items.next_element::<&RawValue>()? {
            (self.0)(item);
        }
        Ok(())
    }
}

impl SkippedItems {
    fn add_error(&mut self, item: usize, message: &str) {
        self.invalid += 1;
        if self.complaints.len() < MAX_ITEM_ERRORS {
            // The message may quote the client's text, so its length is bounded.
            let message = message.chars().take(MAX_MESSAGE_CHARS).collect();
            self.complaints.push(IngestItemError { item, message });
        }
    }
}

/// The fields of a payload that are read. LiteLLM sends null for unknown values.
#[derive(Deserialize)]
struct LitellmLogPayload<'a> {
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
    /// The model as the caller named it; `model` has the provider's name.
    model_group: Option<String>,
    model: Option<String>,
    #[serde(borrow)]
    metadata: Option<LitellmCallMetadata<'a>>,
}

/// The metadata of a call, in callbacks and in spend logs.
#[derive(Deserialize)]
pub(super) struct LitellmCallMetadata<'a> {
    /// The gateway's metadata; other callers may send any JSON value here.
    #[serde(borrow)]
    spend_logs_metadata: Option<&'a RawValue>,
}

/// The metadata that the gateway sends to LiteLLM with each call.
#[derive(Deserialize)]
struct GatewayMetadata {
    run_id: String,
    #[serde(rename = "cogni_deployment_id")]
    deployment: Option<String>,
}

impl LitellmCallMetadata<'_> {
    /// Returns the run and the deployment, or `None` for a call of another caller.
    pub(super) fn run_and_deployment(self) -> (Option<String>, Option<String>) {
        // Other callers may send any JSON here. A value that does not parse belongs to another caller and is no error.
        let ours = self.spend_logs_metadata.map(|told| serde_json::from_str(told.get()));
        match ours {
            Some(Ok(GatewayMetadata { run_id, deployment })) => (Some(run_id), deployment),
            Some(Err(_)) | None => (None, None),
        }
    }
}

/// Returns the reason of an error in an item, without its position, which refers to a text that the client never sees.
pub(super) fn error_reason(error: &Error) -> String {
    let said = error.to_string();
    said.rsplit_once(" at line ").map_or(&*said, |(reason, _)| reason).to_owned()
}

fn parse_notice(item: &RawValue) -> Result<ChargeNotice, String> {
    if !item.get().starts_with('{') {
        return Err("the item is no JSON object".to_owned());
    }
    let payload: LitellmLogPayload<'_> =
        serde_json::from_str(item.get()).map_err(|error| error_reason(&error))?;
    let call_id = payload.litellm_call_id.filter(|id| !id.is_empty());
    let call_id = call_id.ok_or("`litellm_call_id` is missing, so the call is unknown")?;
    // An unknown status is refused: a guess could charge a failed attempt.
    let is_failure = match payload.status.as_deref() {
        Some("success") => false,
        Some("failure") => true,
        _ => return Err("`status` is neither \"success\" nor \"failure\"".to_owned()),
    };
    let ended = payload.ended.and_then(parse_time).ok_or("`endTime` is not a time in seconds")?;
    let (run, deployment) =
        payload.metadata.map(LitellmCallMetadata::run_and_deployment).unwrap_or_default();
    ChargeNotice {
        call_id,
        source: ChargeSource::LitellmCallback,
        run,
        deployment,
        account: payload.end_user,
        model: payload.model_group.filter(|name| !name.is_empty()).or(payload.model),
        is_provisional: is_failure || payload.response_cost.is_none(),
        amount: payload.response_cost.unwrap_or_default(),
        input: Tokens(payload.prompt_tokens.unwrap_or_default()),
        output: Tokens(payload.completion_tokens.unwrap_or_default()),
        started: payload.started.and_then(parse_time).unwrap_or(ended),
        ended,
    }
    .validated()
}

impl ChargeNotice {
    /// # Errors
    /// Returns the reason if a length, an amount or a number of tokens is impossible for one call.
    pub(super) fn validated(self) -> Result<Self, String> {
        if self.call_id.len() > MAX_ID_BYTES {
            return Err(format!("the call's id is longer than {MAX_ID_BYTES} bytes"));
        }
        if self.run.as_ref().is_some_and(|run| run.len() > MAX_ID_BYTES) {
            return Err(format!("`run_id` is longer than {MAX_ID_BYTES} bytes"));
        }
        if self.amount > MAX_AMOUNT {
            return Err(format!("${} is not the price of one call", self.amount));
        }
        if self.input.max(self.output) > MAX_REPORTED_TOKENS {
            return Err("so many tokens are not those of one call".to_owned());
        }
        Ok(self)
    }
}

fn parse_time(seconds: f64) -> Option<SystemTime> {
    let since = Duration::try_from_secs_f64(seconds).ok()?;
    // Later times cannot be formatted as a date.
    (since < MAX_TIME).then(|| SystemTime::UNIX_EPOCH + since)
}

/// The maximum number of item errors in a report. Our choice.
const MAX_ITEM_ERRORS: usize = 10;

/// The maximum length of an item error, in characters. The error may repeat a text of the item. Our choice.
const MAX_MESSAGE_CHARS: usize = 300;

/// The number of notices in a batch, which is one transaction. Our choice: other writers wait no longer than for one
/// batch.
const BATCH_SIZE: usize = 256;

/// The maximum length of a call's or run's id, in bytes: LiteLLM accepts 256 bytes from its caller; our ids have 36.
const MAX_ID_BYTES: usize = 256;

/// The latest accepted time since 1970: the end of the year 9999.
const MAX_TIME: Duration = Duration::from_hours(70_380_768);
