//! A connection that signs its requests for AWS, in the place of the client.
//!
//! The client's own signature is dropped like any credential, so its SDK may sign with keys that are none.
//!
//! **Invariant:** every header of AWS that is sent was made here, or is one that the operator lists, and the signature
//! covers it. A request that would lose another one is refused.

use std::error::Error;
use std::time::SystemTime;

use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Request, header};

use super::aws_signature::{
    AwsSigner, PathEncoding, SignableRequest, UNSIGNED_PAYLOAD, format_amz_date,
};
use super::body::ConnectRequestBody;
use super::query::has_aws_parameter;
use super::refusal::{ConnectDenial, ConnectRefusal};
use super::reserved_headers::is_aws_header;
use crate::base::digest::sha256_hex;
use crate::tools::aws_credential::AwsCredential;
use crate::tools::connection_config::AwsSigningConfig;

/// The checked settings of signatures.
#[derive(Debug)]
pub(super) struct AwsSigning {
    region: String,
    service: String,
    /// The operations that a client may name in `x-amz-target`.
    targets: Vec<String>,
}

impl AwsSigning {
    /// Checks the settings. An error is the key in the table `aws`, and the mistake.
    pub(super) fn new(config: &AwsSigningConfig) -> Result<Self, (String, String)> {
        let is_word = |text: &str| {
            let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
            !text.is_empty() && text.bytes().all(|byte| is_plain(byte) || byte == b'-')
        };
        if !is_word(&config.region) {
            let problem = "is not a region; give one such as `eu-central-1`";
            return Err(("region".to_owned(), problem.to_owned()));
        }
        if !is_word(&config.service) {
            let problem = "is not the name that a service has in signatures; give one such as `s3`";
            return Err(("service".to_owned(), problem.to_owned()));
        }
        let is_target = |target: &String| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.');
            !target.is_empty() && target.bytes().all(is_plain)
        };
        if let Some(number) = config.targets.iter().position(|target| !is_target(target)) {
            let problem = "is not an operation; give one such as `DynamoDB_20120810.GetItem`";
            return Err((format!("targets[{number}]"), problem.to_owned()));
        }
        if config.targets.len() > MAX_TARGETS {
            return Err(("targets".to_owned(), format!("has more than {MAX_TARGETS} operations")));
        }
        let AwsSigningConfig { region, service, targets } = config.clone();
        Ok(Self { region, service, targets })
    }

    /// Returns true if clients may name an operation of the service.
    pub(super) fn has_targets(&self) -> bool {
        !self.targets.is_empty()
    }

    /// Checks a request before anything is reserved for it. `sent` has the headers that are sent, and `length` is the
    /// announced length of the body.
    ///
    /// # Errors
    /// Returns the reason why the request cannot be signed, or the denial of its operation.
    pub(super) fn check_request(
        &self,
        (client, sent): (&HeaderMap, &HeaderMap),
        (path, query): (&str, Option<&str>),
        length: Option<u64>,
    ) -> Result<(), ConnectRefusal> {
        if self.is_s3() && path.contains('+') {
            let problem = "has a `+`, which S3 reads as a space; send `%2B` or `%20`";
            return Err(ConnectRefusal::AmbiguousPath(problem));
        }
        if query.is_some_and(has_aws_parameter) {
            return Err(ConnectRefusal::Unsignable(AWS_PARAMETER.into()));
        }
        if is_signed_in_pieces(client) {
            return Err(ConnectRefusal::Unsignable(SIGNED_PIECES.into()));
        }
        if !self.allows_target((client, sent), query) {
            let (layer, rule) = ("connection", "targets".into());
            return Err(ConnectRefusal::Denied(ConnectDenial { layer, rule }));
        }
        if let Some(name) = find_lost_header(client, sent) {
            return Err(ConnectRefusal::Unsignable(lost_header_problem(name).into()));
        }
        match length {
            _ if self.is_s3() => Ok(()),
            None => Err(ConnectRefusal::LengthRequired),
            Some(length) if length > MAX_SIGNED_BODY_BYTES => Err(ConnectRefusal::TooLarge),
            Some(_) => Ok(()),
        }
    }

    /// Returns the bytes of a body with this announced length that are kept in memory while it is signed.
    pub(super) fn kept_bytes(&self, length: Option<u64>) -> u64 {
        // A longer body is refused before it is read.
        if self.is_s3() { 0 } else { length.unwrap_or_default().min(MAX_SIGNED_BODY_BYTES) }
    }

    /// Signs a request as it is about to be sent.
    ///
    /// # Errors
    /// Returns an error if the body does not arrive as a whole, or the budget does not allow it.
    pub(super) async fn sign_request(
        &self,
        request: &mut Request<ConnectRequestBody>,
        credential: &AwsCredential,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        // 1. The digest of the body. S3 takes a body without one, so that it streams.
        let payload = if self.is_s3() {
            UNSIGNED_PAYLOAD.to_owned()
        } else {
            sha256_hex(&request.body_mut().collect_bytes().await?)
        };
        // 2. The headers that are made here. The date comes after the body, which may have taken its time.
        let date = format_amz_date(SystemTime::now());
        let host = request.uri().authority().map(host_value).unwrap_or_default().parse()?;
        let headers = request.headers_mut();
        headers.insert(header::HOST, host);
        headers.insert(DATE, date.parse()?);
        headers.insert(CONTENT_SHA256, payload.parse()?);
        if let Some(token) = &credential.session_token {
            headers.insert(SECURITY_TOKEN, sensitive_value(token.expose_secret())?);
        }
        // 3. The signature, over everything that AWS acts on.
        let mut signed = HeaderMap::new();
        for (name, value) in request.headers().iter().filter(|(name, _)| is_signed_header(name)) {
            signed.append(name, value.clone());
        }
        let aws = AwsSigner {
            access_key_id: &credential.access_key_id,
            secret_access_key: &credential.secret_access_key,
            region: &self.region,
            service: &self.service,
        };
        let path_encoding = if self.is_s3() { PathEncoding::Single } else { PathEncoding::Double };
        let signable = SignableRequest {
            method: request.method().as_str(),
            path: request.uri().path(),
            path_encoding,
            query: request.uri().query(),
            headers: &signed,
            payload: &payload,
        };
        let authorization = sensitive_value(&aws.authorize(&signable, &date))?;
        request.headers_mut().insert(header::AUTHORIZATION, authorization);
        Ok(())
    }

    /// Returns true if a request names no operation, where the operator lists none, or one that the operator lists. A
    /// client of a service with operations cannot name another one beside it: in the query, or in the body of a form.
    fn allows_target(&self, (client, sent): (&HeaderMap, &HeaderMap), query: Option<&str>) -> bool {
        if !self.has_targets() {
            return !client.contains_key(TARGET);
        }
        // Only what is sent counts: `connection` of the client takes headers out.
        let (target, kind) = (single_value(sent, TARGET), single_value(sent, header::CONTENT_TYPE));
        let (Some(target), Some(kind)) = (target, kind) else { return false };
        let is_listed = self.targets.iter().any(|listed| target == listed.as_str());
        query.is_none() && is_target_type(kind) && is_listed
    }

    fn is_s3(&self) -> bool {
        S3_SERVICES.contains(&&*self.service)
    }
}

/// Returns the header of AWS that the client has set, that would not be sent, and without which the request means something
/// else.
fn find_lost_header<'a>(client: &'a HeaderMap, sent: &HeaderMap) -> Option<&'a HeaderName> {
    client.keys().find(|name| {
        name.as_str().starts_with("x-amz-")
            && !sent.contains_key(*name)
            && !DISPENSABLE_HEADERS.contains(&name.as_str())
    })
}

fn lost_header_problem(name: &HeaderName) -> String {
    let remedy = if is_aws_header(name) {
        "leave it out, or let the operator list it in the connection's `headers`"
    } else {
        "leave it out, because no list can let it pass"
    };
    format!(
        "its header `{name}` would not be sent, and the request means something else without it; {remedy}"
    )
}

/// Returns the value of a header that a request has once.
fn single_value(headers: &HeaderMap, name: HeaderName) -> Option<&HeaderValue> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none())
}

/// Returns true for one type of a body whose operation is in `x-amz-target` alone, such as `application/x-amz-json-1.0`. A
/// list of types is none: a service may act on another type of the list.
fn is_target_type(kind: &HeaderValue) -> bool {
    let Ok(kind) = kind.to_str() else { return false };
    let (kind, parameter) = match kind.split_once(';') {
        Some((kind, parameter)) => (kind.trim_end(), parameter.trim()),
        None => (kind, "charset=utf-8"),
    };
    let is_version = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
    };
    let mut versions = TARGET_TYPES.iter().filter_map(|start| kind.strip_prefix(start));
    versions.any(is_version) && parameter.eq_ignore_ascii_case("charset=utf-8")
}

/// Returns true if the client has signed each piece of its body, or sends a trailer behind it. Such a body is no longer
/// what it was before, and its signatures are the client's own.
fn is_signed_in_pieces(headers: &HeaderMap) -> bool {
    let has_word = |name: HeaderName, word: &[u8]| {
        let values = headers.get_all(name).iter();
        let mut words = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
        words.any(|own| own.trim_ascii().eq_ignore_ascii_case(word))
    };
    let is_streaming = |value: &HeaderValue| {
        value.as_bytes().to_ascii_uppercase().trim_ascii().starts_with(b"STREAMING-")
    };
    has_word(header::CONTENT_ENCODING, b"aws-chunked")
        || headers.get_all(CONTENT_SHA256).iter().any(is_streaming)
        || ["x-amz-decoded-content-length", "x-amz-trailer"]
            .into_iter()
            .any(|name| headers.contains_key(name))
}

fn is_signed_header(name: &HeaderName) -> bool {
    matches!(*name, header::HOST | header::CONTENT_TYPE) || name.as_str().starts_with("x-amz-")
}

/// Returns the value of `host` for an authority, without the usual port.
fn host_value(authority: &Authority) -> &str {
    if authority.port_u16() == Some(443) { authority.host() } else { authority.as_str() }
}

fn sensitive_value(text: &str) -> Result<HeaderValue, header::InvalidHeaderValue> {
    let mut value = HeaderValue::from_str(text)?;
    value.set_sensitive(true);
    Ok(value)
}

/// The header with the operation of a service such as `DynamoDB`.
pub(super) const TARGET: HeaderName = HeaderName::from_static("x-amz-target");

const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const SECURITY_TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");

/// The names in signatures of the services that are S3: a path has one escape, and a body need not have a digest.
const S3_SERVICES: [&str; 3] = ["s3", "s3-object-lambda", "s3-outposts"];

/// The headers of AWS without which a request means the same. The first ones are made here, and the others check
/// bodies on their way, which TLS does, or say what the client is.
const DISPENSABLE_HEADERS: [&str; 12] = [
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-security-token",
    "x-amz-checksum-crc32",
    "x-amz-checksum-crc32c",
    "x-amz-checksum-crc64nvme",
    "x-amz-checksum-sha1",
    "x-amz-checksum-sha256",
    "x-amz-checksum-mode",
    "x-amz-sdk-checksum-algorithm",
    "x-amz-te",
    "x-amz-user-agent",
];

/// The beginnings of the types of bodies whose operation is in `x-amz-target` alone.
const TARGET_TYPES: [&str; 2] = ["application/x-amz-json-", "application/x-amz-cbor-"];

const AWS_PARAMETER: &str = "its query has a parameter that begins with `x-amz-`, as a presigned address has; send a plain request, which the host signs";

const SIGNED_PIECES: &str = "the client has signed the pieces of its body or sends a trailer (`aws-chunked`); set `AWS_REQUEST_CHECKSUM_CALCULATION=when_required`, and let the client sign no payloads";

/// The longest body whose digest is signed, in bytes. Our choice: requests to services other than S3 are documents, and
/// `DynamoDB` takes 16 MiB only for batches.
pub(super) const MAX_SIGNED_BODY_BYTES: u64 = 1024 * 1024;

/// The most operations. Our choice: a person must be able to read them.
const MAX_TARGETS: usize = 256;
