//! A4: Tests of the service's API description.

use crate::support::service::ServiceSetup;

/// The snapshot shows a change to developers of clients.
#[tokio::test(flavor = "multi_thread")]
async fn the_description_is_served_without_a_grant() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let response = setup.client().get("/api/v1/openapi.json").await;
    assert_eq!(response.header("content-type"), Some("application/json"));
    let mut document = response.json();
    assert_eq!(document["openapi"], "3.1.0");
    document["info"]["version"] = "[version]".into();
    insta::assert_json_snapshot!(document);
    setup.stop(service);
}
