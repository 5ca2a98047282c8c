//! The signed provenance statement: which run, under which policy, made a commit.
//!
//! The format is an [in-toto statement](https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md) in a
//! [DSSE envelope](https://github.com/secure-systems-lab/dsse/blob/master/envelope.md). The key that signs the audit's
//! checkpoints signs the statement, and a git note beside the commit holds it. The statement contains no time: the same
//! work under the same key always gives the same text.

use base64::engine::general_purpose::STANDARD_PAD_INDIFFERENT;
use base64::prelude::*;
use serde::{Deserialize, Serialize};

use crate::llm::budget::BudgetAmount;
use crate::relay::repo::ObjectId;
use crate::telemetry::audit::{AuditPublicKey, AuditSigningKey};

/// The facts about a run that are known when its work is delivered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunFacts {
    pub run: String,
    pub agent: String,
    /// The sandbox's file system: the ID of an image, or of a root directory.
    pub image: String,
    /// The hash of the gateway configuration that the run's calls were checked against.
    pub policy: String,
    /// The cost of the run's calls.
    pub spent: BudgetAmount,
}

/// A statement about one commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProvenanceStatement {
    #[serde(flatten)]
    pub facts: RunFacts,
    /// The repository, in the form of
    /// [`canonical_key`](crate::relay::repo::repository::RepositoryUrl::canonical_key).
    pub repository: String,
    pub branch: String,
    /// The commit that the work builds on.
    pub base: ObjectId,
    pub head: ObjectId,
    pub tree: ObjectId,
    /// The hash of the [rules](super::rules::ReviewRules) that reviewed the commit. Empty in earlier versions'
    /// statements.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub rules: String,
    pub verdict: String,
    /// The patch comparison, as in the audit record `relay.judged`: `replayed`, or `bundled` and the reason. Empty if
    /// the comparison is unknown. An earlier version wrote `exact` or `replayed` here, to say whose commits they are.
    pub mode: String,
}

/// An error of reading a signed statement.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatementError {
    #[error("not a signed statement: the envelope cannot be parsed")]
    Malformed,
    #[error("the statement was not signed by `{0}`")]
    WrongSignature(AuditPublicKey),
    #[error("the signed text is not a relay's statement about a commit")]
    OtherStatement,
    #[error("the statement's subject is another commit than its predicate")]
    SubjectMismatch,
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
    /// Signs the statement, and returns the envelope as one line, the text of a git note.
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
            payload: BASE64_URL_SAFE.encode(&payload),
            signatures: vec![DsseSignature {
                keyid: key.public_key().to_string(),
                sig: BASE64_URL_SAFE.encode(signature),
            }],
        };
        serde_json::to_string(&envelope).expect("an envelope has string keys")
    }

    /// Verifies a note's signature by `key`, and returns the statement.
    ///
    /// # Errors
    /// Returns an error if the note is not an envelope, if no signature of `key` fits, or if the payload is not a
    /// statement about the commit that it names.
    pub fn verify(note: &str, key: &AuditPublicKey) -> Result<Self, StatementError> {
        // 1. The envelope is parsed, without trust in any value.
        let envelope: DsseEnvelope =
            serde_json::from_str(note).map_err(|_| StatementError::Malformed)?;
        let payload = base64_decode(&envelope.payload).ok_or(StatementError::Malformed)?;
        // 2. The signature is checked over the exact bytes, before the payload is parsed.
        let text = dsse_signing_input(&envelope.payload_type, &payload);
        let is_theirs = |signature: &DsseSignature| {
            base64_decode(&signature.sig).is_some_and(|bytes| key.verify_message(&text, &bytes))
        };
        if !envelope.signatures.iter().any(is_theirs) {
            return Err(StatementError::WrongSignature(*key));
        }
        // 3. Only now is the payload parsed: the key's owner has written it.
        let payload: InTotoPayload =
            serde_json::from_slice(&payload).map_err(|_| StatementError::OtherStatement)?;
        if payload.kind != STATEMENT_TYPE || payload.predicate_type != PREDICATE_TYPE {
            return Err(StatementError::OtherStatement);
        }
        // 4. The subject and the predicate name the commit twice, and must agree.
        let statement = payload.predicate;
        let matches_statement = |subject: &StatementSubject| {
            subject.digest.commit == statement.head && subject.digest.tree == statement.tree
        };
        if payload.subject.len() == 1 && payload.subject.iter().all(matches_statement) {
            Ok(statement)
        } else {
            Err(StatementError::SubjectMismatch)
        }
    }
}

/// Returns the bytes that a signature covers (DSSE's `PAE`). No other text that the key signs begins with `DSSEv1`.
fn dsse_signing_input(kind: &str, payload: &[u8]) -> Vec<u8> {
    let mut text = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    text.extend_from_slice(payload);
    text
}

/// Decodes base64 of both alphabets, with or without padding: DSSE leaves the alphabet open.
fn base64_decode(text: &str) -> Option<Vec<u8>> {
    STANDARD_PAD_INDIFFERENT.decode(text.replace('-', "+").replace('_', "/")).ok()
}

const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "urn:cogni-gateway:relay:v1";
