//! What this machine vouches for: which run, under which policy, made this commit.
//!
//! It is an [in-toto statement](https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md) in a
//! [DSSE envelope](https://github.com/secure-systems-lab/dsse/blob/master/envelope.md), signed with the key that signs
//! the audit's checkpoints, and lies beside the commit as a git note. It holds no time: the same work under the same
//! key is the same text, however often it is made.

use serde::{Deserialize, Serialize};

use crate::base::b64;
use crate::llm::budget::BudgetAmount;
use crate::relay::repo::ObjectId;
use crate::telemetry::audit::{AuditPublicKey, AuditSigningKey};

/// What is known of a run when its work is delivered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunFacts {
    pub run: String,
    pub agent: String,
    /// What the sandbox was made of: an image's id, or a root directory's.
    pub image: String,
    /// The hash of the configuration that the run's calls were judged by.
    pub policy: String,
    /// What the run's calls have cost.
    pub spent: BudgetAmount,
}

/// What is said about a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProvenanceStatement {
    #[serde(flatten)]
    pub facts: RunFacts,
    /// The repository, as [`key`](crate::relay::repo::repository::RepositoryUrl::canonical_key) says it.
    pub repository: String,
    pub branch: String,
    /// What it builds on.
    pub base: ObjectId,
    pub head: ObjectId,
    pub tree: ObjectId,
    /// The hash of the [rules](super::rules::ReviewRules) that judged it; earlier versions did not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub rules: String,
    pub verdict: String,
    /// Whether the patches tell what the commits are, in the words of `relay.judged`: `replayed`, or `bundled` and why not.
    /// Empty where that is not known any more; an earlier version said `exact` or `replayed` of whose commits they are.
    pub mode: String,
}

/// Why a text is not a statement of somebody's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatementError {
    #[error("it is not a signed statement")]
    Form,
    #[error("it was not signed by `{0}`")]
    Signature(AuditPublicKey),
    #[error("it is signed, but not by a relay for a commit")]
    Kind,
    #[error("it is about another commit than it says")]
    Subject,
}

#[derive(Serialize, Deserialize)]
struct DsseEnvelope {
    #[serde(rename = "payloadType")]
    payload_type: String,
    payload: String,
    signatures: Vec<DsseSignature>,
}

#[derive(Serialize, Deserialize)]
struct DsseSignature {
    keyid: String,
    sig: String,
}

#[derive(Serialize, Deserialize)]
struct InTotoPayload {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<StatementSubject>,
    #[serde(rename = "predicateType")]
    predicate_type: String,
    predicate: ProvenanceStatement,
}

#[derive(Serialize, Deserialize)]
struct StatementSubject {
    name: String,
    digest: SubjectDigest,
}

#[derive(Serialize, Deserialize)]
struct SubjectDigest {
    #[serde(rename = "gitCommit")]
    commit: ObjectId,
    #[serde(rename = "gitTree")]
    tree: ObjectId,
}

impl ProvenanceStatement {
    /// The statement as a note: one line.
    pub fn sign(&self, key: &AuditSigningKey) -> String {
        let payload = InTotoPayload {
            kind: STATEMENT_TYPE.to_owned(),
            subject: vec![StatementSubject {
                name: format!("{}@{}", self.repository, self.branch),
                digest: SubjectDigest { commit: self.head, tree: self.tree },
            }],
            predicate_type: PREDICATE_TYPE.to_owned(),
            predicate: self.clone(),
        };
        let payload = serde_json::to_vec(&payload).expect("a statement has string keys");
        let signature = key.sign_message(&dsse_signing_input(PAYLOAD_TYPE, &payload));
        let envelope = DsseEnvelope {
            payload_type: PAYLOAD_TYPE.to_owned(),
            payload: base64_encode(&payload),
            signatures: vec![DsseSignature {
                keyid: key.public_key().to_string(),
                sig: base64_encode(&signature),
            }],
        };
        serde_json::to_string(&envelope).expect("an envelope has string keys")
    }

    /// Reads a note, which `key` must have signed.
    ///
    /// # Errors
    /// It is none, was changed, or is of somebody else.
    pub fn verify(note: &str, key: &AuditPublicKey) -> Result<Self, StatementError> {
        let envelope: DsseEnvelope =
            serde_json::from_str(note).map_err(|_| StatementError::Form)?;
        let payload = base64_decode(&envelope.payload).ok_or(StatementError::Form)?;
        let text = dsse_signing_input(&envelope.payload_type, &payload);
        let is_theirs = |signature: &DsseSignature| {
            base64_decode(&signature.sig).is_some_and(|bytes| key.verify_message(&text, &bytes))
        };
        if !envelope.signatures.iter().any(is_theirs) {
            return Err(StatementError::Signature(*key));
        }
        let payload: InTotoPayload =
            serde_json::from_slice(&payload).map_err(|_| StatementError::Kind)?;
        if payload.kind != STATEMENT_TYPE || payload.predicate_type != PREDICATE_TYPE {
            return Err(StatementError::Kind);
        }
        let statement = payload.predicate;
        let is_it = |one: &StatementSubject| {
            one.digest.commit == statement.head && one.digest.tree == statement.tree
        };
        if payload.subject.len() == 1 && payload.subject.iter().all(is_it) {
            Ok(statement)
        } else {
            Err(StatementError::Subject)
        }
    }
}

/// What a signature is of (DSSE's `PAE`). No other text that the key signs begins so.
fn dsse_signing_input(kind: &str, payload: &[u8]) -> Vec<u8> {
    let mut text = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    text.extend_from_slice(payload);
    text
}

/// With padding: the envelope leaves the alphabet open, and not every reader does without.
fn base64_encode(bytes: &[u8]) -> String {
    let mut text = String::new();
    b64::encode_base64(bytes, &mut text);
    while !text.len().is_multiple_of(4) {
        text.push('=');
    }
    text
}

fn base64_decode(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=').replace('+', "-").replace('/', "_");
    let mut bytes = vec![0; text.len()];
    let length = b64::decode_base64(&text, &mut bytes)?;
    bytes.truncate(length);
    Some(bytes)
}

const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "urn:cogni-gateway:relay:v1";
