//! What this machine vouches for.

use cogni_gateway::audit::{PublicKey, SigningKey};
use cogni_gateway::base::secret::Secret;
use cogni_gateway::delivery::statement::{Facts, Invalid, Statement};
use cogni_gateway::relay::Sha;
use proptest::prelude::*;

/// L6: a statement says which run made a commit, and proves it; it is the same text each time.
#[test]
fn a_statement_proves_who_made_a_commit() {
    let (key, statement) = (key("1"), statement());
    let note = statement.sign(&key);
    assert_eq!(note, statement.sign(&key));
    assert_eq!(Statement::verify(&note, key.public()), Ok(statement));
    let envelope: serde_json::Value = serde_json::from_str(&note).unwrap();
    assert_eq!(envelope["payloadType"], "application/vnd.in-toto+json");
    assert_eq!(envelope["signatures"][0]["keyid"], key.public().to_string());
}

/// L6: somebody else's signature, or none, proves nothing.
#[test]
fn a_statement_of_somebody_else_proves_nothing() {
    let (ours, theirs) = (key("1"), key("2"));
    let note = statement().sign(&theirs);
    let public = PublicKey::parse(&ours.public().to_string()).unwrap();
    assert_eq!(Statement::verify(&note, &public), Err(Invalid::Signature(public)));
    assert_eq!(Statement::verify("Reviewed-by: me", &public), Err(Invalid::Form));
    let unsigned = note.replace(&note[note.find("[{").unwrap()..note.len() - 1], "[]");
    assert_eq!(Statement::verify(&unsigned, &public), Err(Invalid::Signature(public)));
}

proptest! {
    /// L6: whatever is changed in a statement is found.
    #[test]
    fn a_changed_statement_is_found(at in 0_usize..900, byte in 32_u8..127) {
        let (key, statement) = (key("1"), statement());
        let note = statement.sign(&key);
        let mut changed = note.clone().into_bytes();
        let at = at % changed.len();
        changed[at] = byte;
        let changed = String::from_utf8(changed).unwrap();
        // The same, or nothing: the key's name in it is only a name.
        let verified = Statement::verify(&changed, key.public());
        prop_assert!(verified.is_err() || verified == Ok(statement));
    }
}

fn key(digit: &str) -> SigningKey {
    SigningKey::new(Some(&Secret::new(digit.repeat(64)))).unwrap()
}

fn statement() -> Statement {
    Statement {
        facts: Facts { run: "run-1".to_owned(), agent: "coder".to_owned(), ..Facts::default() },
        repository: "github.com/acme/site".to_owned(),
        branch: "sandbox/task-1".to_owned(),
        base: Sha::of("blob", b"base"),
        head: Sha::of("blob", b"head"),
        tree: Sha::of("blob", b"tree"),
        rules: "5".repeat(64),
        verdict: "push".to_owned(),
        mode: "replayed".to_owned(),
    }
}
