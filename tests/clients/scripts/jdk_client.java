// java.net.http, the HTTP client of LangChain4j: it offers h2c with its first request. A tool call and
// a schema, whole and streamed.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

public class JdkClient {
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static final String SCHEMA =
        "{\"type\": \"object\", \"properties\": {\"colour\": {\"enum\": [\"red\", \"blue\"]}},"
            + " \"required\": [\"colour\"], \"additionalProperties\": false}";

    static String post(String fields) throws Exception {
        String body = "{\"model\": \"" + System.getenv("DOVETAIL_MODEL") + "\", \"temperature\": 0,"
            + " \"max_tokens\": 200, \"messages\": [{\"role\": \"user\", \"content\": \"Sky?\"}], "
            + fields + "}";
        HttpRequest request = HttpRequest.newBuilder()
            .uri(URI.create(System.getenv("DOVETAIL_URL") + "/chat/completions"))
            .header("Content-Type", "application/json")
            .POST(BodyPublishers.ofString(body))
            .build();
        var reply = CLIENT.send(request, BodyHandlers.ofString());
        check(reply.statusCode() == 200, reply.body());
        return reply.body();
    }

    static void check(boolean holds, String what) {
        if (!holds) throw new IllegalStateException(what);
    }

    public static void main(String[] arguments) throws Exception {
        String tools = "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"paint\","
            + " \"parameters\": " + SCHEMA + "}}], \"tool_choice\": \"required\"";
        String called = post(tools);
        check(called.contains("\"paint\"") && called.contains("tool_calls"), called);
        String streamed = post(tools + ", \"stream\": true");
        check(streamed.contains("\"paint\"") && streamed.contains("[DONE]"), streamed);
        String format = "\"response_format\": {\"type\": \"json_schema\", \"json_schema\":"
            + " {\"name\": \"colour\", \"schema\": " + SCHEMA + "}}";
        String written = post(format);
        check(written.contains("red") || written.contains("blue"), written);
        System.out.println("{\"version\": \"" + Runtime.version().feature()
            + "\", \"what\": \"a tool call whole and streamed, a schema\"}");
    }
}
