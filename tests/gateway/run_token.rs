//! G1: Tests of run tokens. A token is valid only with every byte unchanged and only until the second of its expiry.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::prelude::*;
use cogni_gateway::cli::token::inspect_token;
use cogni_gateway::gateway::run::token::{
    MAX_TOKEN_LIFETIME, RunTokenClaims, RunTokenError, RunTokenKeys, RunTokenMintError,
};
use proptest::prelude::*;
use ring::hmac;
use tempfile::NamedTempFile;

proptest! {
    /// G1: A minted token is valid until it expires, whatever the run's name.
    #[test]
    fn a_minted_token_is_valid_until_it_expires(run in "[A-Za-z0-9._:@/-]{1,128}", seconds in 1_u64..1_000_000) {
        let keys = token_keys();
        let token = keys.mint_token(&run, Duration::from_secs(seconds), None, time_at(NOW)).unwrap();
        prop_assert!(token.bytes().all(|byte| byte.is_ascii_graphic()), "{token} fits a header");
        let claims = RunTokenClaims { run, audience: None, issued: NOW, expires: NOW + seconds };
        prop_assert_eq!(keys.verify_token(&token, time_at(NOW)), Ok(claims.clone()));
        prop_assert_eq!(keys.verify_token(&token, time_at(NOW + seconds - 1)), Ok(claims));
        prop_assert_eq!(keys.verify_token(&token, time_at(NOW + seconds)), Err(RunTokenError::Expired));
    }

    /// G1: A token is valid only if the gateway's key signed it, and only in its one spelling.
    #[test]
    fn a_token_that_was_not_minted_is_invalid(text in "(cgr1\\.)?[ -~]{0,600}") {
        prop_assert!(token_keys().verify_token(&text, time_at(NOW)).is_err());
    }
}

/// G1: A token with one byte changed, added or removed is invalid.
#[test]
fn any_change_of_one_byte_is_found() {
    let (keys, token) = (token_keys(), mint_token());
    let believed = |bytes: Vec<u8>| {
        String::from_utf8(bytes).is_ok_and(|text| keys.verify_token(&text, time_at(NOW)).is_ok())
    };
    assert!(believed(token.clone().into_bytes()));
    for at in 0..=token.len() {
        for byte in 0..=127 {
            let mut longer = token.clone().into_bytes();
            longer.insert(at, byte);
            assert!(!believed(longer), "{byte} before byte {at}");
            let mut other = token.clone().into_bytes();
            if other.get(at).is_some_and(|old| *old != byte) {
                other[at] = byte;
                assert!(!believed(other), "{byte} as byte {at}");
            }
        }
        let mut shorter = token.clone().into_bytes();
        if at < token.len() {
            shorter.remove(at);
            assert!(!believed(shorter), "without byte {at}");
        }
    }
}

/// G1: The parts of two valid tokens do not make a third one.
#[test]
fn parts_of_tokens_do_not_combine() {
    let keys = token_keys();
    let other =
        keys.mint_token("run-2", Duration::from_hours(2), Some("old"), time_at(NOW)).unwrap();
    let (one, other) = (token_parts(&mint_token()), token_parts(&other));
    for choice in 1..7_usize {
        let mixed: Vec<_> = (0..3)
            .map(|part| if choice & (1 << part) == 0 { &one[part] } else { &other[part] })
            .collect();
        let mixed = format!("cgr1.{}.{}.{}", mixed[0], mixed[1], mixed[2]);
        assert_eq!(
            keys.verify_token(&mixed, time_at(NOW)),
            Err(RunTokenError::WrongSignature),
            "{mixed}"
        );
    }
}

/// G1: Each reason why a token is invalid has its own error, for operators.
#[test]
fn each_fault_of_a_token_has_its_own_error() {
    let keys = token_keys();
    let strangers = RunTokenKeys::parse_keys(&format!("new = {}", "33".repeat(32))).unwrap();
    let unknown = RunTokenKeys::parse_keys(&format!("other = {}", "11".repeat(32))).unwrap();
    let signed =
        |keys: &RunTokenKeys, claims: &RunTokenClaims| keys.sign_claims(claims, None).unwrap();
    let claims = |run: &str| RunTokenClaims {
        run: run.into(),
        audience: None,
        issued: NOW,
        expires: NOW + 60,
    };
    let fault = |token: &str| keys.verify_token(token, time_at(NOW)).unwrap_err();
    assert_eq!(fault(&signed(&strangers, &claims("run-1"))), RunTokenError::WrongSignature);
    assert_eq!(fault(&signed(&unknown, &claims("run-1"))), RunTokenError::UnknownKey);
    assert_eq!(fault(&signed(&keys, &claims("../run"))[1..]), RunTokenError::Malformed);
    // A claim without a valid run name is invalid, signed or not.
    assert_eq!(fault(&signed(&keys, &claims("run 1"))), RunTokenError::Malformed);
    assert_eq!(fault(&signed(&keys, &claims(&"x".repeat(129)))), RunTokenError::Malformed);
    assert_eq!(fault(&"cgr1.".repeat(200)), RunTokenError::Malformed);
    assert_eq!(fault(""), RunTokenError::Malformed);
    let late = RunTokenClaims {
        audience: None,
        issued: NOW + 61,
        expires: NOW + 120,
        run: "run-1".into(),
    };
    assert_eq!(fault(&signed(&keys, &late)), RunTokenError::IssuedInFuture);
    let early = RunTokenClaims { issued: NOW + 60, ..late };
    assert_eq!(keys.verify_token(&signed(&keys, &early), time_at(NOW)), Ok(early));
    let endless =
        RunTokenClaims { audience: None, issued: u64::MAX, expires: u64::MAX, run: "run-1".into() };
    assert_eq!(fault(&signed(&keys, &endless)), RunTokenError::IssuedInFuture);
}

/// G1: Two installations share keys, and each accepts only its own tokens.
#[test]
fn a_token_is_for_one_installation() {
    let name = "x".repeat(64);
    let [no_audience, eu, us] =
        [None, Some(&*name), Some("us-1")].map(|name| token_keys().for_audience(name));
    let run = "r".repeat(128);
    let mint = |keys: &RunTokenKeys| {
        keys.mint_token(&run, Duration::from_hours(1), None, time_at(NOW)).unwrap()
    };
    for (own, others) in
        [(&no_audience, [&eu, &us]), (&eu, [&no_audience, &us]), (&us, [&eu, &no_audience])]
    {
        let token = mint(own);
        assert!(own.verify_token(&token, time_at(NOW)).is_ok(), "{token}");
        for other in others {
            assert_eq!(other.verify_token(&token, time_at(NOW)), Err(RunTokenError::OtherAudience));
            assert_eq!(other.verify_signature(&token), Err(RunTokenError::OtherAudience));
        }
    }
    assert_eq!(eu.verify_token(&mint(&eu), time_at(NOW)).unwrap().audience, Some(name));
}

/// G1: Claims that another program signed with the same key are accepted only in exactly this version's form.
#[test]
fn claims_are_exactly_those_of_this_version() {
    let keys = token_keys();
    let fault = |claims: &str| {
        let mut signed = "cgr1.new.".to_owned();
        BASE64_URL_SAFE_NO_PAD.encode_string(claims, &mut signed);
        let key = hmac::Key::new(hmac::HMAC_SHA256, &[0x11; 32]);
        let mac = hmac::sign(&key, signed.as_bytes());
        signed.push('.');
        BASE64_URL_SAFE_NO_PAD.encode_string(mac, &mut signed);
        keys.verify_token(&signed, time_at(NOW)).err()
    };
    let until = NOW + 60;
    assert_eq!(fault(&format!(r#"{{"run":"r","iat":{NOW},"exp":{until}}}"#)), None);
    for claims in [
        format!(r#"{{"run":"r","iat":{NOW},"exp":{until},"admin":true}}"#),
        format!(r#"{{"run":"r","iat":{NOW},"exp":{until},"exp":99999999999}}"#),
        format!(r#"{{"run":"r","exp":{until}}}"#),
        format!(r#"{{"run":"r","iat":{NOW},"exp":-1}}"#),
        String::new(),
    ] {
        assert_eq!(fault(&claims), Some(RunTokenError::Malformed), "{claims}");
    }
}

/// G1: A new key signs new tokens, and tokens of the old key stay valid until that key is removed.
#[test]
fn keys_rotate_without_a_gap() {
    let old = RunTokenKeys::parse_keys(&format!("old = {OLD}")).unwrap();
    let token = old.mint_token("run-1", Duration::from_hours(1), None, time_at(NOW)).unwrap();
    let both = token_keys();
    assert!(both.verify_token(&token, time_at(NOW)).is_ok());
    let next = both.mint_token("run-1", Duration::from_hours(1), None, time_at(NOW)).unwrap();
    assert!(next.starts_with("cgr1.new."), "the first key signs");
    assert_eq!(old.verify_token(&next, time_at(NOW)), Err(RunTokenError::UnknownKey));
    let new = RunTokenKeys::parse_keys(&format!("new = {NEW}")).unwrap();
    assert_eq!(new.verify_token(&token, time_at(NOW)), Err(RunTokenError::UnknownKey));
    assert!(new.verify_token(&next, time_at(NOW)).is_ok());
}

/// G1: A token without a run or without a valid lifetime cannot be minted.
#[test]
fn a_token_is_for_a_run_and_for_a_time() {
    let mint = |run: &str, ttl, key_id| token_keys().mint_token(run, ttl, key_id, time_at(NOW));
    let hour = Duration::from_hours(1);
    assert_eq!(mint("run-1", Duration::from_millis(999), None), Err(RunTokenMintError::TooShort));
    assert!(mint("run-1", MAX_TOKEN_LIFETIME, None).is_ok());
    let messages = [
        mint("run-1", MAX_TOKEN_LIFETIME + hour, None).unwrap_err(),
        mint("run 1", hour, None).unwrap_err(),
        mint("run-1", hour, Some("older")).unwrap_err(),
    ];
    insta::assert_snapshot!(messages.map(|error| error.to_string()).join("\n"), @r"
    a token may be valid for 30days at most
    `run 1` is not a valid run id; use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`
    there is no key `older`; there are: `new`, `old`
    ");
}

/// G1: A file of keys is accepted as a whole or not at all, and no error shows a key.
#[test]
fn the_error_of_a_wrong_key_file_names_the_line() {
    let error = |text: &str| RunTokenKeys::parse_keys(text).unwrap_err().to_string();
    let messages = [
        error("# none\n\n"),
        error("new 1111"),
        error("a b = 1111"),
        error("new = hunter2hunter2"),
        error(&format!("new = {}", "11".repeat(31))),
        error(&format!("# twice\nnew = {NEW}\n\nnew = {OLD}")),
        RunTokenKeys::read_file("/nowhere/keys".as_ref()).unwrap_err().to_string(),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r"
    there are no run token keys; write `id = key`, with 64 hexadecimal digits (`openssl rand -hex 32`)
    line 1 of the run token keys is not `id = key`
    line 1 of the run token keys: `a b` is not a key's id; use 1 to 32 letters, digits, `_` or `-`
    line 1 of the run token keys: the key `new` has 14 characters; it must be 32 bytes as 64 hexadecimal digits or as base64 (`openssl rand -hex 32` makes one)
    line 1 of the run token keys: the key `new` has 62 characters; it must be 32 bytes as 64 hexadecimal digits or as base64 (`openssl rand -hex 32` makes one)
    line 4 of the run token keys: `new` occurs twice; give each key its own id
    the run token keys in `/nowhere/keys` cannot be read
    ");
    assert_eq!(format!("{:?}", token_keys()), r#"["new", "old"]"#);
}

/// G1: A key may be written in each common encoding.
#[test]
fn a_key_is_the_same_in_every_spelling() {
    let token = RunTokenKeys::parse_keys(&format!("k={}", "fb".repeat(32)))
        .unwrap()
        .mint_token("run-1", Duration::from_hours(1), None, time_at(NOW))
        .unwrap();
    for key in [
        "FBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFBFB",
        "+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/s=",
        "-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_s",
    ] {
        assert!(
            RunTokenKeys::parse_keys(&format!("  k = {key}  "))
                .unwrap()
                .verify_token(&token, time_at(NOW))
                .is_ok()
        );
    }
}

/// G1: `mint` prints only the token on standard output, so that scripts can use it.
#[test]
fn mint_prints_a_token_and_inspect_reads_it() {
    let keys = write_file(&format!("new = {NEW}\nold = {OLD}"));
    let path = keys.path().to_str().unwrap();
    let mint = ["mint", "--run-id", "run-1", "--ttl", "1h", "--keys-file", path];
    let (code, token, output) = run_cogni(&mint, "");
    assert_eq!((code, output.as_str()), (0, ""));
    let claims = token_keys().verify_token(token.trim_end(), SystemTime::now()).unwrap();
    assert_eq!((claims.run.as_str(), claims.expires - claims.issued), ("run-1", 3600));
    let (code, text, _) = run_cogni(&["inspect", "--keys-file", path], &token);
    assert!(code == 0 && text.ends_with("valid    yes\n"), "{text}");
    let named = [&mint[..], &["--audience", "eu-1"]].concat();
    let (_, token, _) = run_cogni(&named, "");
    let (code, text, _) =
        run_cogni(&["inspect", "--keys-file", path, "--audience", "eu-1"], &token);
    assert!(code == 0 && text.contains("audience eu-1\n"), "{text}");
    let (code, text, _) = run_cogni(&["inspect", "--keys-file", path], &token);
    assert!(
        code == 1 && text.contains("valid    no: the token is for another installation"),
        "{text}"
    );
    let (code, _, output) = run_cogni(&["inspect"], "sk-1234");
    insta::assert_snapshot!(format!("{code}: {output}"), @"2: error: this is not a run token; one begins with `cgr1.` (`cogni-gateway token mint` makes them)");
    let (code, _, output) = run_cogni(&["mint", "--run-id", "run-1", "--ttl", "1h"], "");
    insta::assert_snapshot!(format!("{code}: {output}"), @r"
    2: error: the following required arguments were not provided:
      --keys-file <PATH>

    Usage: cogni-gateway token mint --run-id <ID> --ttl <TIME> --keys-file <PATH>

    For more information, try '--help'.
    ");
}

/// G1: `inspect` prints whether a token is valid, for people.
#[test]
fn inspect_says_whether_a_token_is_valid() {
    let inspected = |keys: Option<&str>, now: u64| {
        let keys = keys.map(|text| RunTokenKeys::parse_keys(text).unwrap());
        let mut text = vec![];
        inspect_token(&mint_token(), keys.as_ref(), time_at(now), &mut text).unwrap();
        String::from_utf8(text).unwrap()
    };
    let (new_keys, old_keys) = (format!("new = {NEW}"), format!("new = {OLD}"));
    insta::assert_snapshot!(inspected(Some(&new_keys), NOW), @r"
    run      run-1
    key      new
    issued   2026-11-22T02:00:00Z
    expires  2026-11-22T03:00:00Z
    valid    yes
    ");
    let last = |keys, now| inspected(keys, now).lines().last().unwrap().to_owned();
    insta::assert_snapshot!(last(Some(&new_keys), NOW + 3600), @"valid    no: the token has expired");
    insta::assert_snapshot!(last(Some(&old_keys), NOW), @"valid    no: the token was not signed with the key that it names");
    insta::assert_snapshot!(last(None, NOW), @"valid    not known; name the keys with --keys-file");
}

fn token_keys() -> RunTokenKeys {
    RunTokenKeys::parse_keys(&format!("new = {NEW}\nold = {OLD}")).unwrap()
}

fn mint_token() -> String {
    token_keys().mint_token("run-1", Duration::from_hours(1), None, time_at(NOW)).unwrap()
}

fn token_parts(token: &str) -> Vec<String> {
    token.split('.').skip(1).map(str::to_owned).collect()
}

fn time_at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn write_file(text: &str) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    file
}

/// Returns exit code, standard output and standard error.
fn run_cogni(arguments: &[&str], input: &str) -> (i32, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .arg("token")
        .args(arguments)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The program may have ended already without reading its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// 2026-11-22T02:00:00Z.
const NOW: u64 = 1_795_312_800;
const NEW: &str = "1111111111111111111111111111111111111111111111111111111111111111";
const OLD: &str = "2222222222222222222222222222222222222222222222222222222222222222";
