//! The webhook of questions: signed messages to one receiver, and signed replies from it.
//!
//! Messages and replies are signed as [Standard Webhooks](https://www.standardwebhooks.com) say: HMAC-SHA256 over
//! `id.timestamp.body`, in the headers `webhook-id`, `webhook-timestamp` and `webhook-signature`. The two directions have
//! a key each, so that no message of ours can come back as a reply.
//!
//! **Invariant:** a reply counts only with a valid signature, within its time, and once. It names a grant by a table of
//! the operator's, and the grant's own rights decide.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, Uri, header};
use http_body_util::Full;
use hyper_util::client::legacy;
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::tools::credential_source::CredentialSource;
use crate::tools::http_connector::{ServerConnector, build_client, parse_server_url};

/// The receiver of messages about questions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    /// The receiver's address, such as `https://example.com/approvals`.
    pub url: String,
    /// The place of the key that signs messages: `whsec_` and its Base64.
    pub secret: CredentialSource,
    /// The place of the key that signs replies. Without it, no reply is taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply_secret: Option<CredentialSource>,
    /// The grants of the people who may answer, by the names that the receiver has for them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub approvers: BTreeMap<String, String>,
}

/// The sender of messages and the judge of replies.
#[derive(Debug)]
pub struct Webhook {
    config: WebhookConfig,
    url: Uri,
    client: legacy::Client<ServerConnector, Full<Bytes>>,
}

/// A table of a webhook that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`tools.approvals.webhook.{key}`: {problem}")]
pub struct WebhookError {
    key: &'static str,
    problem: String,
}

/// The reason why a reply does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    #[error(
        "the headers `webhook-id`, `webhook-timestamp` and `webhook-signature` are needed, once each"
    )]
    Headers,
    #[error("the signature is not of this body and these headers")]
    Signature,
    #[error("the timestamp is more than five minutes away from this service's clock; sign again")]
    Timestamp,
    /// The key cannot be read. The log has the reason.
    #[error("this service takes no signed replies now")]
    NoKey,
}

impl Webhook {
    /// Creates the client of a receiver. No key is read.
    ///
    /// # Errors
    /// Returns an error if the table contradicts itself or the address cannot be used.
    pub fn new(config: &WebhookConfig) -> Result<Self, WebhookError> {
        let wrong = |key, problem: &str| Err(WebhookError { key, problem: problem.to_owned() });
        let (url, connector) = match parse_server_url(&config.url) {
            Ok(parsed) => parsed,
            Err(problem) => return wrong("url", problem),
        };
        let sources =
            [("secret", Some(&config.secret)), ("reply_secret", config.reply_secret.as_ref())];
        for (key, source) in sources {
            if source.is_some_and(|source| !source.has_one_place()) {
                return wrong(key, "needs one of `env` and `file`");
            }
        }
        if config.reply_secret.as_ref() == Some(&config.secret) {
            return wrong("reply_secret", "is `secret`; give the replies a key of their own");
        }
        if config.reply_secret.is_some() == config.approvers.is_empty() {
            return wrong("approvers", "and `reply_secret` need each other; give both, or none");
        }
        if config
            .approvers
            .iter()
            .any(|(user, grant)| user.is_empty() || !grant.starts_with("grant-"))
        {
            return wrong("approvers", "has the ids of grants by users: `U024BE7LH = \"grant-…\"`");
        }
        let client = build_client(connector);
        Ok(Self { config: config.clone(), url, client })
    }

    /// Checks that the keys can be read.
    ///
    /// # Errors
    /// Returns an error that names the key's place and never its value.
    pub fn check_keys(&self) -> Result<(), WebhookError> {
        let check = |key, source: &CredentialSource| {
            read_key(source).map(drop).map_err(|problem| WebhookError { key, problem })
        };
        check("secret", &self.config.secret)?;
        self.config.reply_secret.iter().try_for_each(|source| check("reply_secret", source))
    }

    /// Returns the grant of a user of the receiver.
    pub fn find_approver(&self, user: &str) -> Option<&str> {
        self.config.approvers.get(user).map(String::as_str)
    }

    /// Returns true if the receiver may answer.
    pub fn takes_replies(&self) -> bool {
        self.config.reply_secret.is_some()
    }

    /// Sends a message. The receiver has it if the answer's status is a success; no redirect is followed.
    pub(super) async fn send_message(&self, id: &str, body: &str) -> Result<(), String> {
        let key = read_key(&self.config.secret)?;
        let timestamp = unix_seconds(SystemTime::now()).to_string();
        let signature = hmac::sign(&key, &signed_text(id, &timestamp, body.as_bytes()));
        let request = Request::post(self.url.clone())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::USER_AGENT, USER_AGENT)
            .header(ID_HEADER, id)
            .header(TIMESTAMP_HEADER, timestamp)
            .header(SIGNATURE_HEADER, format!("v1,{}", STANDARD.encode(signature)))
            .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
            .map_err(|error| error.to_string())?;
        let response = tokio::time::timeout(SEND_TIMEOUT, self.client.request(request)).await;
        let response = response
            .map_err(|_| "no answer in time".to_owned())?
            .map_err(|error| format!("no answer: {error}"))?;
        // The body of the answer is not read: the receiver cannot make this process hold it.
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(format!("status {}", StatusCode::as_u16(&status))),
        }
    }

    /// Checks the signature of a reply, and returns the reply's id, which must count once.
    ///
    /// # Errors
    /// Returns the reason why the reply does not count.
    pub fn check_reply(
        &self,
        headers: &HeaderMap,
        body: &[u8],
        now: SystemTime,
    ) -> Result<String, ReplyError> {
        let source = self.config.reply_secret.as_ref().ok_or(ReplyError::NoKey)?;
        let key = read_key(source).map_err(|error| {
            tracing::error!(error, "the key of signed replies cannot be read");
            ReplyError::NoKey
        })?;
        let [id, timestamp, signatures] = [ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER]
            .map(|name| single_header(headers, name));
        let (Some(id), Some(timestamp), Some(signatures)) = (id, timestamp, signatures) else {
            return Err(ReplyError::Headers);
        };
        // An id with a dot would let two triples of headers and body have one signed text.
        if !(1..=MAX_ID_BYTES).contains(&id.len()) || id.contains('.') {
            return Err(ReplyError::Headers);
        }
        let text = signed_text(id, timestamp, body);
        let is_signed = signatures.split(' ').take(MAX_SIGNATURES).any(|signature| {
            let encoded = signature.strip_prefix("v1,");
            let bytes = encoded.and_then(|encoded| STANDARD.decode(encoded).ok());
            bytes.is_some_and(|bytes| hmac::verify(&key, &text, &bytes).is_ok())
        });
        if !is_signed {
            return Err(ReplyError::Signature);
        }
        // The time is judged last, so that only the holder of the key learns about this clock.
        let signed: u64 = timestamp.parse().map_err(|_| ReplyError::Timestamp)?;
        if signed.abs_diff(unix_seconds(now)) > REPLY_WINDOW.as_secs() {
            return Err(ReplyError::Timestamp);
        }
        Ok(id.to_owned())
    }
}

fn single_header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut given = headers.get_all(name).iter();
    let only = given.next().filter(|_| given.next().is_none())?;
    only.to_str().ok()
}

fn signed_text(id: &str, timestamp: &str, body: &[u8]) -> Vec<u8> {
    [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].concat()
}

/// Reads a key. The error names the place and never the value.
fn read_key(source: &CredentialSource) -> Result<hmac::Key, String> {
    let secret = source.read_value()?;
    let encoded = secret.expose_secret().strip_prefix("whsec_");
    let key = encoded.and_then(|encoded| STANDARD.decode(encoded).ok());
    match key {
        Some(key) if KEY_BYTES.contains(&key.len()) => Ok(hmac::Key::new(hmac::HMAC_SHA256, &key)),
        _ => Err("it is not `whsec_` and the Base64 of 24 to 64 bytes".to_owned()),
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

const ID_HEADER: &str = "webhook-id";
const TIMESTAMP_HEADER: &str = "webhook-timestamp";
const SIGNATURE_HEADER: &str = "webhook-signature";

const USER_AGENT: &str = concat!("cogni-gateway/", env!("CARGO_PKG_VERSION"));

/// The lengths of keys that Standard Webhooks allow.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// The longest distance between the time of a reply and this clock, as in the libraries of Standard Webhooks.
pub const REPLY_WINDOW: Duration = Duration::from_mins(5);

/// The longest id of a reply, in bytes. Our choice.
const MAX_ID_BYTES: usize = 128;

/// The most signatures of a reply that are tried: a key that is being replaced makes two.
const MAX_SIGNATURES: usize = 4;

/// The longest wait for the receiver's answer. Our choice.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
