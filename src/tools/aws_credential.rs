//! A credential of AWS: the JSON that a `credential_process` prints.
//!
//! **Invariant:** an error names the mistake and never a part of the value.

use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde_json::error::Category;

use crate::base::secret::SecretString;
use crate::base::timestamp::format_rfc3339_seconds;

/// A credential of AWS. The id of its key is no secret: AWS shows it in records and errors.
#[derive(Clone, Debug)]
pub(super) struct AwsCredential {
    pub(super) access_key_id: String,
    pub(super) secret_access_key: SecretString,
    /// The token of a credential that is valid for some time.
    pub(super) session_token: Option<SecretString>,
}

/// The members of the JSON that count. AWS' tools print further ones.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct PrintedCredential {
    version: Option<u64>,
    access_key_id: Option<String>,
    secret_access_key: Option<SecretString>,
    session_token: Option<SecretString>,
    expiration: Option<String>,
}

impl AwsCredential {
    /// Parses the JSON, and checks that the credential is valid at a time.
    ///
    /// # Errors
    /// Returns the mistake, without any part of the value.
    pub(super) fn parse_valid(value: &SecretString, now: SystemTime) -> Result<Self, String> {
        let printed: PrintedCredential = serde_json::from_str(value.expose_secret())
            .map_err(|error| describe_json_error(&error))?;
        if printed.version != Some(1) {
            return Err("its JSON has no `\"Version\": 1`".to_owned());
        }
        let id = printed.access_key_id.filter(|id| !id.is_empty());
        let access_key_id = id.ok_or("its JSON has no `AccessKeyId`")?;
        if !access_key_id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return Err("its `AccessKeyId` has a character that an id cannot have".to_owned());
        }
        let secret_access_key = printed.secret_access_key;
        let secret_access_key = secret_access_key.ok_or("its JSON has no `SecretAccessKey`")?;
        check_secret("SecretAccessKey", &secret_access_key)?;
        // Some programs print an empty token for a credential without one.
        let session_token = printed.session_token.filter(|token| !token.is_empty());
        if let Some(token) = &session_token {
            check_secret("SessionToken", token)?;
        }
        if let Some(text) = printed.expiration {
            let end = parse_time(&text).ok_or("its `Expiration` is not a time of ISO 8601")?;
            if end <= now {
                return Err(format!("it has expired at {}", format_rfc3339_seconds(end)));
            }
        }
        Ok(Self { access_key_id, secret_access_key, session_token })
    }

    /// Returns the values that no answer may contain.
    pub(super) fn secrets(&self) -> Vec<&SecretString> {
        [&self.secret_access_key].into_iter().chain(&self.session_token).collect()
    }
}

/// Describes an error by its place. The library's own text may have a part of the value.
fn describe_json_error(error: &serde_json::Error) -> String {
    let problem = match error.classify() {
        Category::Data => "a member has a wrong type",
        Category::Syntax | Category::Eof | Category::Io => "it is not JSON",
    };
    let (line, column) = (error.line(), error.column());
    format!("it is not what a `credential_process` prints: {problem}, line {line}, column {column}")
}

fn check_secret(name: &str, secret: &SecretString) -> Result<(), String> {
    let secret = secret.expose_secret();
    if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!("its `{name}` has a character that a header cannot have"));
    }
    if secret.len() < MIN_SECRET_BYTES {
        return Err(format!("its `{name}` is shorter than 8 bytes"));
    }
    Ok(())
}

/// Parses a time such as `2026-11-25T23:00:00Z`, also one with an offset instead of the `Z`, as the command line of AWS
/// prints it.
fn parse_time(text: &str) -> Option<SystemTime> {
    if let Ok(time) = humantime::parse_rfc3339(text) {
        return Some(time);
    }
    let (time, offset) = text.split_at_checked(text.len().checked_sub("+00:00".len())?)?;
    let time = humantime::parse_rfc3339(&format!("{time}Z")).ok()?;
    let number = |text: &str| -> Option<u64> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
    };
    let (hours, minutes) = offset.get(1..)?.split_once(':')?;
    let offset_time = Duration::from_secs(number(hours)? * 3600 + number(minutes)? * 60);
    match offset.as_bytes()[0] {
        b'+' => time.checked_sub(offset_time),
        b'-' => time.checked_add(offset_time),
        _ => None,
    }
}

/// The shortest secret that is searched for in answers, which is the redactor's own limit.
const MIN_SECRET_BYTES: usize = 8;

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    fn parse(text: &str) -> Result<AwsCredential, String> {
        let now = humantime::parse_rfc3339("2026-11-25T12:00:00Z").unwrap();
        AwsCredential::parse_valid(&SecretString::new(text), now)
    }

    /// A credential with this end, in the JSON of a `credential_process`.
    fn ending(expiration: &str) -> String {
        format!(
            r#"{{"Version": 1, "AccessKeyId": "AKIDEXAMPLE", "SecretAccessKey": "s3cret-s3cret", "Expiration": "{expiration}"}}"#
        )
    }

    #[test]
    fn a_credential_is_read_from_its_json() {
        let text = r#"
            {"Version": 1, "AccessKeyId": "AKIDEXAMPLE", "SecretAccessKey": "s3cret-s3cret",
             "SessionToken": "t0ken-t0ken", "AccountId": "123456789012"}
        "#;
        let parsed = parse(text).unwrap();
        let secrets: Vec<_> =
            parsed.secrets().into_iter().map(SecretString::expose_secret).collect();
        assert_eq!(secrets, ["s3cret-s3cret", "t0ken-t0ken"]);
        assert!(!format!("{parsed:?}").contains("s3cret"));
        let without = text.replace("t0ken-t0ken", "");
        assert!(parse(&without).unwrap().session_token.is_none());
    }

    /// An error tells the place of a mistake, and has no part of the value, which the library's own text would have.
    #[test]
    fn an_error_has_no_part_of_the_value() {
        let no_json = "it is not what a `credential_process` prints: it is not JSON";
        let wrong_type = "it is not what a `credential_process` prints: a member has a wrong type";
        let cases = [
            ("s3cret-s3cret", no_json),
            ("\"s3cret-s3cret\"", wrong_type),
            (r#"{"Version": "s3cret-s3cret"}"#, wrong_type),
            (r#"{"Version": 2, "AccessKeyId": "s3cret"}"#, "its JSON has no `\"Version\": 1`"),
            (
                r#"{"Version": 1, "SecretAccessKey": "s3cret-s3cret"}"#,
                "its JSON has no `AccessKeyId`",
            ),
            (
                r#"{"Version": 1, "AccessKeyId": "AKID", "s3cret": 1}"#,
                "its JSON has no `SecretAccessKey`",
            ),
            (
                r#"{"Version": 1, "AccessKeyId": "AKID/s3cret", "SecretAccessKey": "s3cret-s3cret"}"#,
                "its `AccessKeyId` has a character that an id cannot have",
            ),
            (
                r#"{"Version": 1, "AccessKeyId": "AKID", "SecretAccessKey": "s3cret"}"#,
                "its `SecretAccessKey` is shorter than 8 bytes",
            ),
            (
                r#"{"Version": 1, "AccessKeyId": "AKID", "SecretAccessKey": "s3cret\ns3cret"}"#,
                "its `SecretAccessKey` has a character that a header cannot have",
            ),
            (
                r#"{"Version": 1, "AccessKeyId": "AKID", "SecretAccessKey": "s3cret-s3cret", "SessionToken": "t0"}"#,
                "its `SessionToken` is shorter than 8 bytes",
            ),
            (&ending("s3cret"), "its `Expiration` is not a time of ISO 8601"),
            (&ending("2026-11-25T12:00:00Z"), "it has expired at 2026-11-25T12:00:00Z"),
        ];
        for (text, expected) in cases {
            let error = parse(text).unwrap_err();
            assert_eq!(error.split(", line").next(), Some(expected), "{text}");
            assert!(!error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn an_end_is_read_with_its_offset() {
        let seconds = |text: &str| {
            let time = parse_time(text)?;
            Some(time.duration_since(UNIX_EPOCH).unwrap().as_secs())
        };
        let midnight = seconds("2026-11-25T00:00:00Z");
        assert!(midnight.is_some());
        for same in
            ["2026-11-25T00:00:00+00:00", "2026-11-25T02:30:00+02:30", "2026-11-24T19:00:00-05:00"]
        {
            assert_eq!(seconds(same), midnight, "{same}");
        }
        for wrong in [
            "",
            "Z",
            "2026-11-25",
            "2026-11-25T00:00:00",
            "2026-11-25T00:00:00+0000",
            "2026-11-25T00:00:00+-1:00",
            "ä",
        ] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
        assert!(parse(&ending("2026-11-25T12:00:01Z")).is_ok());
        assert!(parse(&ending("2026-11-25T13:00:00+01:00")).is_err());
    }
}
