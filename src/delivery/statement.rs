//! What this machine vouches for: which run, under which policy, made this commit.
//!
//! It is an [in-toto statement](https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md) in a
//! [DSSE envelope](https://github.com/secure-systems-lab/dsse/blob/master/envelope.md), signed with the key that signs
//! the audit's checkpoints, and lies beside the commit as a git note. It holds no time: the same work under the same
//! key is the same text, however often it is made.

use serde::{Deserialize, Serialize};

use crate::audit::{PublicKey, SigningKey};
use crate::base::b64;
use crate::budget::Amount;
use crate::relay::Sha;

/// What is known of a run when its work is delivered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    pub run: String,
    pub agent: String,
    /// What the sandbox was made of: an image's id, or a root directory's.
    pub image: String,
    /// The hash of the configuration that the run's calls were judged by.
    pub policy: String,
    /// What the run's calls have cost.
    pub spent: Amount,
}

/// What is said about a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement {
    #[serde(flatten)]
    pub facts: Facts,
    /// The repository, as [`key`](crate::relay::repository::Repository::key) says it.
    pub repository: String,
    pub branch: String,
    /// What it builds on.
    pub base: Sha,
    pub head: Sha,
    pub tree: Sha,
    /// The hash of the [rules](super::rules::Rules) that judged it; earlier versions did not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub rules: String,
    pub verdict: String,
    /// Whether the patches tell what the commits are, in the words of `relay.judged`: `replayed`, or `bundled` and why not.
    /// Empty where that is not known any more; an earlier version said `exact` or `replayed` of whose commits they are.
    pub mode: String,
}

/// Why a text is not a statement of somebody's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("it is not a signed statement")]
    Form,
    #[error("it was not signed by `{0}`")]
    Signature(PublicKey),
    #[error("it is signed, but not by a relay for a commit")]
    Kind,
    #[error("it is about another commit than it says")]
    Subject,
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    #[serde(rename = "payloadType")]
    payload_type: String,
    payload: String,
    signatures: Vec<Signature>,
}

#[derive(Serialize, Deserialize)]
struct Signature {
    keyid: String,
    sig: String,
}

#[derive(Serialize, Deserialize)]
struct Payload {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    #[serde(rename = "predicateType")]
    predicate_type: String,
    predicate: Statement,
}

#[derive(Serialize, Deserialize)]
struct Subject {
    name: String,
    digest: Digest,
}

#[derive(Serialize, Deserialize)]
struct Digest {
    #[serde(rename = "gitCommit")]
    commit: Sha,
    #[serde(rename = "gitTree")]
    tree: Sha,
}

impl Statement {
    /// The statement as a note: one line.
    pub fn sign(&self, key: &SigningKey) -> String {
        let payload = Payload {
            kind: STATEMENT.to_owned(),
            subject: vec![Subject {
                name: format!("{}@{}", self.repository, self.branch),
                digest: Digest { commit: self.head, tree: self.tree },
            }],
            predicate_type: PREDICATE.to_owned(),
            predicate: self.clone(),
        };
        let payload = serde_json::to_vec(&payload).expect("a statement has string keys");
        let signature = key.sign_text(&signed(PAYLOAD_TYPE, &payload));
        let envelope = Envelope {
            payload_type: PAYLOAD_TYPE.to_owned(),
            payload: packed(&payload),
            signatures: vec![Signature {
                keyid: key.public().to_string(),
                sig: packed(&signature),
            }],
        };
        serde_json::to_string(&envelope).expect("an envelope has string keys")
    }

    /// Reads a note, which `key` must have signed.
    ///
    /// # Errors
    /// It is none, was changed, or is of somebody else.
    pub fn verify(note: &str, key: &PublicKey) -> Result<Self, Invalid> {
        let envelope: Envelope = serde_json::from_str(note).map_err(|_| Invalid::Form)?;
        let payload = unpacked(&envelope.payload).ok_or(Invalid::Form)?;
        let text = signed(&envelope.payload_type, &payload);
        let is_theirs = |signature: &Signature| {
            unpacked(&signature.sig).is_some_and(|bytes| key.verifies_text(&text, &bytes))
        };
        if !envelope.signatures.iter().any(is_theirs) {
            return Err(Invalid::Signature(*key));
        }
        let payload: Payload = serde_json::from_slice(&payload).map_err(|_| Invalid::Kind)?;
        if payload.kind != STATEMENT || payload.predicate_type != PREDICATE {
            return Err(Invalid::Kind);
        }
        let statement = payload.predicate;
        let is_it = |one: &Subject| {
            one.digest.commit == statement.head && one.digest.tree == statement.tree
        };
        if payload.subject.len() == 1 && payload.subject.iter().all(is_it) {
            Ok(statement)
        } else {
            Err(Invalid::Subject)
        }
    }
}

/// What a signature is of (DSSE's `PAE`). No other text that the key signs begins so.
fn signed(kind: &str, payload: &[u8]) -> Vec<u8> {
    let mut text = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    text.extend_from_slice(payload);
    text
}

/// With padding: the envelope leaves the alphabet open, and not every reader does without.
fn packed(bytes: &[u8]) -> String {
    let mut text = String::new();
    b64::encode(bytes, &mut text);
    while !text.len().is_multiple_of(4) {
        text.push('=');
    }
    text
}

fn unpacked(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=').replace('+', "-").replace('/', "_");
    let mut bytes = vec![0; text.len()];
    let length = b64::decode(&text, &mut bytes)?;
    bytes.truncate(length);
    Some(bytes)
}

const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
const STATEMENT: &str = "https://in-toto.io/Statement/v1";
const PREDICATE: &str = "urn:cogni-gateway:relay:v1";
