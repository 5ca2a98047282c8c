//! Tests of statements, which this machine signs about commits.

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::delivery::statement::{ProvenanceStatement, RunFacts, StatementError};
use cogni_gateway::relay::repo::ObjectId;
use cogni_gateway::telemetry::audit::{AuditPublicKey, AuditSigningKey};
use proptest::prelude::*;

/// L6: A statement names the run that made a commit, and proves it. The same facts always give the same text.
#[test]
fn a_statement_proves_who_made_a_commit() {
    let (key, statement) = (signing_key("1"), example_statement());
    let note = statement.sign(&key);
    assert_eq!(note, statement.sign(&key));
    assert_eq!(ProvenanceStatement::verify(&note, key.public_key()), Ok(statement));
    let envelope: serde_json::Value = serde_json::from_str(&note).unwrap();
    assert_eq!(envelope["payloadType"], "application/vnd.in-toto+json");
    assert_eq!(envelope["signatures"][0]["keyid"], key.public_key().to_string());
}

/// L6: A statement with another key's signature, or without a signature, proves nothing.
#[test]
fn a_statement_of_another_key_proves_nothing() {
    let (own_key, other_key) = (signing_key("1"), signing_key("2"));
    let note = example_statement().sign(&other_key);
    let public = AuditPublicKey::parse_public_key(&own_key.public_key().to_string()).unwrap();
    assert_eq!(
        ProvenanceStatement::verify(&note, &public),
        Err(StatementError::WrongSignature(public))
    );
    assert_eq!(
        ProvenanceStatement::verify("Reviewed-by: me", &public),
        Err(StatementError::Malformed)
    );
    let unsigned = note.replace(&note[note.find("[{").unwrap()..note.len() - 1], "[]");
    assert_eq!(
        ProvenanceStatement::verify(&unsigned, &public),
        Err(StatementError::WrongSignature(public))
    );
}

proptest! {
    /// L6: Verification detects any change of a statement.
    #[test]
    fn a_changed_statement_is_found(at in 0_usize..900, byte in 32_u8..127) {
        let (key, statement) = (signing_key("1"), example_statement());
        let note = statement.sign(&key);
        let mut changed = note.clone().into_bytes();
        let at = at % changed.len();
        changed[at] = byte;
        let changed = String::from_utf8(changed).unwrap();
        // The statement is unchanged, or the change is invalid: the key's name in the statement is only a label.
        let verified = ProvenanceStatement::verify(&changed, key.public_key());
        prop_assert!(verified.is_err() || verified == Ok(statement));
    }
}

fn signing_key(digit: &str) -> AuditSigningKey {
    AuditSigningKey::new(Some(&SecretString::new(digit.repeat(64)))).unwrap()
}

fn example_statement() -> ProvenanceStatement {
    ProvenanceStatement {
        facts: RunFacts {
            run: "run-1".to_owned(),
            agent: "coder".to_owned(),
            ..RunFacts::default()
        },
        repository: "github.com/acme/site".to_owned(),
        branch: "sandbox/task-1".to_owned(),
        base: ObjectId::hash_object("blob", b"base"),
        head: ObjectId::hash_object("blob", b"head"),
        tree: ObjectId::hash_object("blob", b"tree"),
        rules: "5".repeat(64),
        verdict: "push".to_owned(),
        mode: "replayed".to_owned(),
    }
}
