//! T6: Tests of signatures for AWS with AWS' own tests, which `tests/fixtures/aws_sig_v4.json` holds.

use cogni_gateway::base::digest::sha256_hex;
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::tools::connection::aws_signature::{
    AwsSigner, PathEncoding, SignableRequest, format_amz_date,
};
use cogni_gateway::tools::connection::request_path::RequestPath;
use http::{HeaderMap, HeaderName};
use serde_json::Value;

/// The request of a test, as its text has it.
struct VectorRequest {
    method: String,
    path: String,
    query: Option<String>,
    headers: HeaderMap,
    body: String,
}

impl VectorRequest {
    fn parse(text: &str) -> Self {
        // A line that begins with a space belongs to the header of the line before.
        let text = text.replace("\n ", " ");
        let (head, body) = text.split_once("\n\n").unwrap_or((text.trim_end(), ""));
        let mut lines = head.lines();
        let (method, target) = lines.next().unwrap().split_once(' ').unwrap();
        let target = target.strip_suffix(" HTTP/1.1").unwrap();
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path, Some(query.to_owned())),
            None => (target, None),
        };
        let mut headers = HeaderMap::new();
        for line in lines {
            let (name, value) = line.split_once(':').unwrap();
            headers.append(name.parse::<HeaderName>().unwrap(), value.trim().parse().unwrap());
        }
        let (method, path, body) = (method.to_owned(), path.to_owned(), body.to_owned());
        Self { method, path, query, headers, body }
    }

    fn signable<'a>(&'a self, encoding: PathEncoding, payload: &'a str) -> SignableRequest<'a> {
        SignableRequest {
            method: &self.method,
            path: &self.path,
            path_encoding: encoding,
            query: self.query.as_deref(),
            headers: &self.headers,
            payload,
        }
    }
}

fn vectors() -> Vec<Value> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/aws_sig_v4.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    fixture["tests"].as_array().unwrap().clone()
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("no {name} in {value}"))
}

/// Signs the request of a test as its context says, and compares the result of each step.
fn check_vector(vector: &Value) {
    let (name, context) = (text(vector, "name"), &vector["context"]);
    let credentials = &context["credentials"];
    let mut request = VectorRequest::parse(text(vector, "request"));
    let date = format_amz_date(humantime::parse_rfc3339(text(context, "timestamp")).unwrap());
    request.headers.insert("x-amz-date", date.parse().unwrap());
    let payload = sha256_hex(request.body.as_bytes());
    if context["sign_body"] == true {
        request.headers.insert("x-amz-content-sha256", payload.parse().unwrap());
    }
    if credentials["token"].is_string() && context["omit_session_token"] != true {
        let token = text(credentials, "token").parse().unwrap();
        request.headers.insert("x-amz-security-token", token);
    }
    let secret = SecretString::new(text(credentials, "secret_access_key"));
    let signer = AwsSigner {
        access_key_id: text(credentials, "access_key_id"),
        secret_access_key: &secret,
        region: text(context, "region"),
        service: text(context, "service"),
    };
    let signable = request.signable(PathEncoding::Single, &payload);
    let canonical = signable.to_canonical();
    assert_eq!(String::from_utf8_lossy(&canonical), text(vector, "canonical_request"), "{name}");
    let to_sign = signer.string_to_sign(&canonical, &date);
    assert_eq!(to_sign, text(vector, "string_to_sign"), "{name}");
    let authorization = signer.authorize(&signable, &date);
    let signature = authorization.rsplit_once("Signature=").unwrap().1;
    assert_eq!(signature, text(vector, "signature"), "{name}");
}

/// AWS' tests agree with the signature. A path that AWS' tests change before they sign it is one that no connection
/// sends.
#[test]
fn the_tests_of_aws_agree() {
    let (mut signed, mut refused) = (0, 0);
    for vector in vectors().iter().filter(|vector| vector["context"].is_object()) {
        let request = VectorRequest::parse(text(vector, "request"));
        let is_changed = vector["context"]["normalize"] == true
            && (request.path.contains("//") || request.path.contains("/."));
        if is_changed {
            let problem = RequestPath::parse(&request.path);
            assert!(problem.is_err(), "{}", text(vector, "name"));
            refused += 1;
        } else {
            check_vector(vector);
            signed += 1;
        }
    }
    assert_eq!((signed, refused), (32, 6));
}

/// Services other than S3 sign a path whose escapes are escaped again.
#[test]
fn the_tests_of_aws_agree_about_escapes() {
    let mut count = 0;
    for vector in vectors().iter().filter(|vector| vector["context"].is_null()) {
        let request = VectorRequest::parse(text(vector, "request"));
        let signable = request.signable(PathEncoding::Double, "");
        let canonical = String::from_utf8(signable.to_canonical()).unwrap();
        let path = |text: &str| text.lines().nth(1).unwrap().to_owned();
        assert_eq!(path(&canonical), path(text(vector, "canonical_request")));
        count += 1;
    }
    assert_eq!(count, 2);
}

/// A path for S3 has one escape for each character, however the client has written it. A parameter keeps its bytes.
#[test]
fn a_path_for_s3_is_not_escaped_twice() {
    let request = VectorRequest::parse(
        "GET /bucket/a%2fb%c3%a4(1)%20x?b=%2f+%ff&a&b=1&&c=a=b HTTP/1.1\nHost: x",
    );
    let canonical = request.signable(PathEncoding::Single, "-").to_canonical();
    insta::assert_snapshot!(String::from_utf8(canonical).unwrap(), @r"
    GET
    /bucket/a/b%C3%A4%281%29%20x
    a=&b=%2F%20%FF&b=1&c=a%3Db
    host:x

    host
    -
    ");
}
