//! T6: Tests with AWS' SDK for Python: it works over connections that sign for it, with keys that are none.

use serde_json::json;

use super::parse_lines;
use super::setup::{peers_file, venv_path};
use crate::tools::connections::aws::verifying_server::start_aws_service;
use crate::tools::connections::aws::{KeyFile, SESSION_KEY};
use crate::tools::connections::clients::{SandboxPort, shown};
use crate::tools::connections::server::Answer;
use crate::tools::start_app;

/// The SDK reads, writes and lists objects and asks a table, and the services verify each signature. What the operator has
/// not listed, and addresses that the SDK presigns, are refused.
#[tokio::test(flavor = "multi_thread")]
async fn boto3_works_with_keys_that_are_none() {
    let listing =
        "<ListBucketResult><Contents><Key>drafts/long</Key></Contents></ListBucketResult>";
    let objects = start_aws_service(SESSION_KEY, move |seen| match seen.method.as_str() {
        "PUT" => Answer::text(""),
        _ if seen.target.contains("list-type") => Answer::text(listing),
        _ => Answer::text("the object"),
    })
    .await;
    let tables =
        start_aws_service(SESSION_KEY, |_| Answer::text(r#"{"Item": {"id": {"S": "1"}}}"#)).await;
    let key = KeyFile::new(&SESSION_KEY);
    let targets = ", targets = ['DynamoDB_20120810.GetItem']";
    let keys = "AWS_ACCESS_KEY_ID = 'unused', AWS_SECRET_ACCESS_KEY = 'unused'";
    let region = "AWS_DEFAULT_REGION = 'eu-central-1'";
    let table = objects.table(
        "objects",
        &format!(
            "{}env = {{ AWS_ENDPOINT_URL_S3 = '${{URL}}', {keys}, {region} }}\n",
            key.lines("s3", "")
        ),
    ) + &tables.table(
        "tables",
        &format!(
            "{}env = {{ AWS_ENDPOINT_URL_DYNAMODB = '${{URL}}/' }}\n",
            key.lines("dynamodb", targets)
        ),
    );
    let app = start_app(&table).await;
    let port = SandboxPort::open(&app, &table).await;
    let (python, script) = (venv_path("sdk").join("bin/python"), peers_file("boto3_sdk.py"));
    let calls = [
        ("put_object", 200, json!(null)),
        ("upload_file", 200, json!(null)),
        ("list_objects", 200, json!(["drafts/long"])),
        ("get_object", 200, json!("the object")),
        ("presigned", 403, json!(null)),
        ("get_item", 200, json!("1")),
        ("delete_table", 403, json!(null)),
    ];
    let names = calls.iter().map(|(name, ..)| *name);
    let arguments: Vec<_> = [script.to_str().unwrap()].into_iter().chain(names).collect();
    let output = port.run(python.to_str().unwrap(), &arguments).await;
    assert!(output.status.success(), "{}", shown(&output));
    let seen = parse_lines(str::from_utf8(&output.stdout).unwrap());
    let expected =
        calls.map(|(_, status, seen)| json!({ "status": status, "seen": seen })).to_vec();
    assert_eq!(seen, expected, "{}", shown(&output));
    let uploaded: Vec<_> = objects.seen().iter().map(|seen| seen.body.len()).collect();
    assert_eq!(uploaded, [5, 200_000, 0, 0]);
    app.stop().await;
}
