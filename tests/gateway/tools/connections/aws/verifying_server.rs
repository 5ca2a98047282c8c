//! A server of AWS for tests: it computes the signature of each request itself, and answers only if both agree.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, SystemTime};

use cogni_gateway::base::digest::sha256_hex;
use ring::hmac;
use serde_json::{Value, json};

use super::super::server::{Answer, ConnectedRequest, SecureServer};

/// A key that the server knows.
#[derive(Clone, Debug)]
pub(crate) struct AwsKey {
    pub(crate) id: &'static str,
    pub(crate) secret: &'static str,
    pub(crate) token: Option<&'static str>,
}

impl AwsKey {
    /// Returns the JSON that a `credential_process` prints for the key.
    pub(crate) fn to_json(&self) -> Value {
        let mut printed = json!({
            "Version": 1,
            "AccessKeyId": self.id,
            "SecretAccessKey": self.secret,
            "Expiration": "2099-01-01T00:00:00+00:00",
        });
        if let Some(token) = self.token {
            printed["SessionToken"] = token.into();
        }
        printed
    }
}

/// Starts a server whose services have one key. It answers `ok`, or 403 with the mistake.
pub(crate) async fn start_aws_server(key: AwsKey) -> SecureServer {
    start_aws_service(key, |_| Answer::text("ok")).await
}

/// Starts a server that answers the requests whose signature it has verified.
pub(crate) async fn start_aws_service(
    key: AwsKey,
    answer: impl Fn(&ConnectedRequest) -> Answer + Send + Sync + 'static,
) -> SecureServer {
    SecureServer::answering(move |seen| match verify_request(seen, &key) {
        Ok(()) => answer(seen),
        Err(mistake) => Answer { status: 403, ..Answer::text(mistake) },
    })
    .await
}

/// Verifies a request as AWS does, by what has arrived.
fn verify_request(seen: &ConnectedRequest, key: &AwsKey) -> Result<(), String> {
    let header = |name: &str| -> Result<String, String> {
        let values: Vec<_> =
            seen.headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect();
        if values.is_empty() { Err(format!("no {name}")) } else { Ok(values.join(",")) }
    };
    let authorization = header("authorization")?;
    let fields = authorization.strip_prefix("AWS4-HMAC-SHA256 ").ok_or("another algorithm")?;
    let fields: BTreeMap<_, _> =
        fields.split(", ").filter_map(|field| field.split_once('=')).collect();
    let scope: Vec<_> = fields["Credential"].split('/').collect();
    let [id, day, region, service, "aws4_request"] = scope[..] else {
        return Err("another scope".to_owned());
    };
    if id != key.id || region != "eu-central-1" {
        return Err(format!("the scope is {id} {region}"));
    }
    let (date, digest) = (header("x-amz-date")?, header("x-amz-content-sha256")?);
    check_date(&date, day)?;
    if digest != sha256_hex(&seen.body) && (service != "s3" || digest != "UNSIGNED-PAYLOAD") {
        return Err("the digest of the body is another".to_owned());
    }
    if seen.headers.get("x-amz-security-token").map(|token| token.to_str().unwrap()) != key.token {
        return Err("the token is another".to_owned());
    }
    let names: Vec<_> = fields["SignedHeaders"].split(';').collect();
    let must_be_signed =
        |name: &str| matches!(name, "host" | "content-type") || name.starts_with("x-amz-");
    for name in seen.headers.keys().map(http::HeaderName::as_str) {
        if must_be_signed(name) && !names.contains(&name) {
            return Err(format!("{name} is not signed"));
        }
    }
    let (path, query) = seen.target.split_once('?').unwrap_or((&seen.target, ""));
    let path = if service == "s3" { path.to_owned() } else { path.replace('%', "%25") };
    let mut canonical = format!("{}\n{path}\n{}\n", seen.method, sorted_query(query));
    for name in &names {
        writeln!(canonical, "{name}:{}", header(name)?.trim()).unwrap();
    }
    write!(canonical, "\n{}\n{digest}", names.join(";")).unwrap();
    let scope = scope[1..].join("/");
    let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{}", sha256_hex(canonical.as_bytes()));
    let signed = |key: &[u8], text: &str| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
    };
    let first = format!("AWS4{}", key.secret).into_bytes();
    let own_key =
        [day, region, service, "aws4_request"].iter().fold(first, |key, part| signed(&key, part));
    if hex::encode(signed(&own_key, &text)) != fields["Signature"] {
        return Err(format!("the signature is another one for:\n{canonical}"));
    }
    Ok(())
}

/// Returns the parameters in their order. The tests escape them as AWS does.
fn sorted_query(query: &str) -> String {
    let parameters = query.split('&').filter(|parameter| !parameter.is_empty());
    let with_sign = |parameter: &str| {
        let sign = if parameter.contains('=') { "" } else { "=" };
        format!("{parameter}{sign}")
    };
    let mut parameters: Vec<_> = parameters.map(with_sign).collect();
    parameters.sort_unstable();
    parameters.join("&")
}

/// Checks that a date is of this day and of the last minutes, as AWS does.
fn check_date(date: &str, day: &str) -> Result<(), String> {
    let (own_day, time) = date.split_once('T').ok_or("no time")?;
    let text = format!(
        "{}-{}-{}T{}:{}:{}",
        &own_day[..4],
        &own_day[4..6],
        &own_day[6..],
        &time[..2],
        &time[2..4],
        &time[4..]
    );
    let time = humantime::parse_rfc3339(&text).map_err(|_| format!("the date is {date}"))?;
    let distance = SystemTime::now().duration_since(time).map_err(|_| "it is of the future")?;
    if own_day != day || distance > Duration::from_mins(5) {
        return Err(format!("the date is {date}"));
    }
    Ok(())
}
